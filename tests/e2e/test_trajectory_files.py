"""A training run's token-level records, dumps, best checkpoint, row metrics and plots, from one short run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlflow.observe.plots import write_plots
from rlflow.observe.records import Trajectory, parse_trajectory


def records(path: Path) -> list[Trajectory]:
    found = [parse_trajectory(json.loads(text)) for text in path.read_text().splitlines()]
    return [record for record in found if record is not None]


@pytest.mark.timeout(200)
def test_what_a_step_leaves_about_its_trajectories(
    run_trainer: Callable[..., Any],
    tiny_overrides: list[str],
    read_metrics: Callable[[], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    run_trainer(
        [
            *tiny_overrides,
            "actor_rollout_ref.actor.use_kl_loss=true",
            f"trainer.rollout_data_dir={tmp_path}/dump",
            "trainer.trace.trajectories_per_step=4",
            "trainer.test_freq=1",
            "trainer.save_freq=1",
            "trainer.max_actor_ckpt_to_keep=1",
        ]
    )
    run = tmp_path / "checkpoints"
    names = {"1.jsonl", "2.jsonl", "val_1.jsonl", "val_2.jsonl"}
    assert {path.name for path in (run / "trajectories").iterdir()} == names

    group = records(run / "trajectories" / "2.jsonl")
    assert len(group) == 3 and len({record.uid for record in group}) == 1, "one whole group of three fits into four"
    for record in group:
        tokens = len(record.response_ids)
        assert record.step == 2 and record.partition == "train" and record.min_version == record.max_version == 1
        assert len(record.response_tokens) == len(record.response_mask) == tokens
        assert all(len(values) == tokens for values in record.series.values())
        assert set(record.series) == {
            "rollout_log_probs", "rm_scores", "old_log_probs", "entropy", "ref_log_prob", "advantages", "returns",
        }  # fmt: skip
        rollout, trainer = record.series["rollout_log_probs"], record.series["old_log_probs"]
        assert max(abs(a - b) for a, b in zip(rollout, trainer, strict=True)) < 1e-4
        writers = {name: item.writer for name, item in record.lineage.items()}
        assert writers["responses"] == "agent_loop_worker_0" and writers["old_log_probs"] == "old_log_prob"
        assert writers["advantages"] == "adv" and writers["ref_log_prob"] == "ref"
        times = [record.lineage[name].time for name in ("responses", "old_log_probs", "ref_log_prob", "advantages")]
        assert record.started is not None and [record.started, *times] == sorted([record.started, *times])
        assert record.lineage["advantages"].version == 1
        assert record.reward_extra_info["acc"] == record.reward and record.timings["generate_sequences"] > 0

    dump = [json.loads(text) for text in (tmp_path / "dump" / "2.jsonl").read_text().splitlines()]
    assert len(dump) == 6 and {row["uid"] for row in dump} > {record.key for record in group}
    assert all(row["acc"] == row["score"] and row["step"] == 2 for row in dump)

    first, second = (line["data"] for line in read_metrics())
    rewards = [row["score"] for row in dump]
    assert second["reward_extra/acc/mean"] == pytest.approx(sum(rewards) / 6)
    assert 0 < second["agent_loop/generate_sequences/min"] <= second["agent_loop/generate_sequences/max"]
    assert second["agent_loop/slowest/response_length"] <= 8 and second["timing_s/testing"] > 0

    best = json.loads((run / "best_checkpoint.json").read_text())
    values = [data["val-core/tiny/sums/acc/mean@1"] for data in (first, second)]
    assert best["metric"] == "val-core/tiny/sums/acc/mean@1" and best["value"] == max(values)
    assert best["step"] == values.index(max(values)) + 1 and Path(best["path"]).is_dir(), "never deleted"

    assert {path.name for path in write_plots(run)} == {
        "reward.png",
        "length.png",
        "kl.png",
        "timing.png",
        "validation.png",
    }
