"""Replicas that die in a whole run with two FSDP ranks, at the moments between which a step has its borders."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlflow.observe.journal import read_lines
from rlflow.trainer.ppo.trainer_sync import PPOTrainerSync

pytestmark = [pytest.mark.timeout(280), pytest.mark.slow]

Run = Callable[..., Any]
SHARED = [
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.supervisor.heartbeat_s=0.5",
    "actor_rollout_ref.rollout.supervisor.hang_timeout_s=3",
    "actor_rollout_ref.rollout.supervisor.max_restarts=9",
]
# Generation takes a second or two, so that a fault meets sessions that run.
LONG = [
    "data.max_response_length=300",
    "actor_rollout_ref.rollout.ignore_eos=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024",
]


def strike(trainer: PPOTrainerSync, what: signal.Signals, *ranks: int) -> None:
    """Send a signal to the servers of these replicas."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):  # it is not back yet
            os.kill(trainer.runtime.server_manager.rollout_replicas[rank].pids[0], what)


class Struck(PPOTrainerSync):
    """Loses replicas while it validates, generates, trains, and just before a sync."""

    def on_init_end(self) -> None:
        strike(self, signal.SIGKILL, 1)  # before the first weights
        super().on_init_end()

    def on_sample_begin(self) -> None:
        if self.global_steps == 1:
            strike(self, signal.SIGKILL, 0)  # sessions run

    def on_sample_end(self) -> None:
        super().on_sample_end()
        if self.global_steps == 2:
            strike(self, signal.SIGKILL, 1)  # asleep, the trainer computes

    def on_step_end(self, metrics: dict[str, Any], timing: dict[str, float]) -> None:
        if self.global_steps == 3:
            strike(self, signal.SIGKILL, 0, 1)  # both, and nobody knows
        super().on_step_end(metrics, timing)

    def on_step_begin(self) -> None:
        if self.global_steps == 4:
            strike(self, signal.SIGSTOP, 1)  # idle

    def _validate(self) -> dict[str, float]:
        if self.global_steps == 2:
            strike(self, signal.SIGKILL, 0)
        return super()._validate()


def test_two_ranks_lose_replicas_at_every_stage(
    run_trainer: Run, tiny_overrides: list[str], read_metrics: Callable[[], list[dict[str, Any]]], tmp_path: Path
) -> None:
    steps = ["trainer.total_training_steps=5", "trainer.test_freq=2"]
    run_trainer([*tiny_overrides, *SHARED, *LONG, *steps], Struck)
    lines = [line["data"] for line in read_metrics()]
    events = list(read_lines(tmp_path / "checkpoints" / "events.jsonl"))
    for line in lines:
        assert line["training/rollout_log_probs_diff/max"] < 1e-3, "every replica sampled from the weights of its step"
        assert "training/rollout_failure/groups" not in line
    trained = [e for e in events if e["event"] == "trained"]
    assert [(len(set(e["uids"])), e["rows"]) for e in trained] == [(2, 6)] * 5, "two prompts of three sessions a step"
    lost = {e["step"] for e in events if e["event"] == "replica_lost"}
    assert {0, 1, 2, 3, 4} <= lost
    serving = [(e["step"], e["version"]) for e in events if e["event"] == "replica_serving"]
    assert all(step - version in (0, 1) for step, version in serving), "with the weights of the moment"
