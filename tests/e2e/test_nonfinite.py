"""A run in which one row's advantage is NaN goes on or stops as it is told to, and says which row it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rlflow.transfer_queue as tq
from rlflow.cli.main import main
from rlflow.observe.journal import read_lines
from rlflow.trainer.ppo.batching import partition_of
from rlflow.trainer.ppo.trainer_sync import PPOTrainerSync
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import NonFiniteGradientError


class Poisons(PPOTrainerSync):
    """In one step the advantages of one row of the balanced batch are NaN."""

    STEP, ROW = 2, 4

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_advantage(batch, metrics)
        if self.global_steps == self.STEP:
            key = batch.keys[self.ROW]
            advantages = tq.kv_batch_get([key], partition_of(batch), ["advantages"])["advantages"]
            poison = tu.nested_from_list([torch.full_like(advantages.unbind()[0], float("nan"))])
            tq.kv_batch_put([key], partition_of(batch), fields=tu.get_tensordict({"advantages": poison}))
        return batch


def faults(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(run / "events.jsonl") if line["event"] == "fault"]


def test_a_poisoned_row_is_skipped_dumped_and_found(tiny_overrides, run_trainer, read_metrics, tmp_path, capsys):
    run_trainer([*tiny_overrides, "trainer.total_training_steps=3", "trainer.save_freq=1"], Poisons)
    lines = [line["data"] for line in read_metrics()]
    assert [line["actor/skipped_steps"] for line in lines] == [0, 1, 0]
    assert [line.get("actor/skipped_in_a_row") for line in lines] == [None, 1, None]

    run = tmp_path / "checkpoints"
    (fault,) = faults(run)
    dump = run / "nonfinite" / "step_2_actor_1"
    assert fault["what"] == "nonfinite_gradient" and fault["step"] == 2 and fault["dumps"] == [str(dump)]
    capsys.readouterr()
    assert main(["replay", str(dump), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == [[[0, Poisons.ROW]]] and found["fields"] == {"advantages": [[0, Poisons.ROW]]}
    assert found["weights"] == str(run / "global_step_1" / "actor") and found["same_weights"]


class PoisonsAtOnce(Poisons):
    STEP = 1


def test_a_run_that_is_to_stop_ends_with_the_error_by_name(tiny_overrides, run_trainer, tmp_path):
    stop = ["actor_rollout_ref.actor.optim.nonfinite_grad=stop", "actor_rollout_ref.actor.fuse_old_log_prob=true"]
    with pytest.raises(NonFiniteGradientError, match="actor, step 1: .*nonfinite_grad=stop"):
        run_trainer([*tiny_overrides, *stop], PoisonsAtOnce)
    run = tmp_path / "checkpoints"
    assert [fault["what"] for fault in faults(run)] == ["nonfinite_gradient", "NonFiniteGradientError"]
    assert (run / "nonfinite" / "step_1_actor_1" / "dump.json").is_file()
