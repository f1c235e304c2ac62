"""A run whose checkpoints are written while it goes on: each counts once it is whole.

That a run goes on from one is part of test_resume.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlflow.checkpoint import checkpoint_step, list_checkpoints, read_tracker, verify_manifest
from rlflow.observe.journal import read_lines
from rlflow.trainer.ppo import checkpointing
from rlflow.trainer.ppo.best import best_steps


def saved_steps(run: Path) -> list[int]:
    return [line["step"] for line in read_lines(run / "events.jsonl") if line["event"] == "saved"]


def test_background_saves_count_when_they_are_whole(
    tiny_overrides, run_trainer, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    run = tmp_path / "checkpoints"
    prepared: list[tuple[int, bool]] = []
    prepare = checkpointing.PreparedCheckpoint

    def noted(pending: Any, step: int, *args: Any) -> Any:
        # Whatever was prepared before is whole and counts by now.
        assert read_tracker(run) == (step - 1 or None)
        assert [checkpoint_step(path) for path in list_checkpoints(run)][:1] == ([step - 1] if step > 1 else [])
        found = prepare(pending, step, *args)
        prepared.append((step, found.in_background))
        return found

    monkeypatch.setattr(checkpointing, "PreparedCheckpoint", noted)
    options = [
        "actor_rollout_ref.actor.checkpoint.async_save=true",
        "trainer.save_freq=1",
        "trainer.test_freq=1",
        "trainer.max_actor_ckpt_to_keep=2",
    ]
    config = run_trainer([*tiny_overrides, *options, "trainer.total_training_steps=3"]).config
    assert prepared == [(step, True) for step in (1, 2, 3)]
    assert read_tracker(run) == 3 and saved_steps(run) == [1, 2, 3]
    kept = {checkpoint_step(path) for path in list_checkpoints(run)}
    assert kept == {2, 3} | set(best_steps(run, config)) and best_steps(run, config)
    assert all(verify_manifest(path) == [] for path in list_checkpoints(run))
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []
