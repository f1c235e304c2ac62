"""Which checkpoint a run goes on from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlflow.checkpoint import atomic_directory, write_manifest, write_tracker
from rlflow.trainer.ppo.checkpointing import _checkpoint_to_load
from rlflow.utils.errors import CheckpointError


def config(root: Path, mode: str = "auto", path: str | None = None) -> Any:
    return SimpleNamespace(
        trainer=SimpleNamespace(default_local_dir=str(root), resume_mode=mode, resume_from_path=path)
    )


def save(root: Path, step: int) -> Path:
    with atomic_directory(root / f"global_step_{step}") as folder:
        (folder / "state").write_text(f"step {step}")
        write_manifest(folder)
    write_tracker(root, step)
    return root / f"global_step_{step}"


def test_a_fresh_folder_starts_from_scratch(tmp_path: Path) -> None:
    assert _checkpoint_to_load(config(tmp_path / "new")) is None


def test_the_newest_whole_one_is_taken(tmp_path: Path) -> None:
    whole, damaged = save(tmp_path, 1), save(tmp_path, 2)
    (damaged / "state").write_text("stap 2")
    assert _checkpoint_to_load(config(tmp_path)) == whole
    assert _checkpoint_to_load(config(tmp_path, mode="disable")) is None


def test_damaged_checkpoints_alone_are_never_trained_over(tmp_path: Path) -> None:
    (save(tmp_path, 2) / "state").unlink()
    with pytest.raises(CheckpointError, match="global_step_2.*none is whole.*resume_mode=disable"):
        _checkpoint_to_load(config(tmp_path))


def test_a_named_checkpoint_must_be_whole(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    assert _checkpoint_to_load(config(tmp_path, "resume_path", str(folder))) == folder
    (folder / "state").write_text("other")
    with pytest.raises(CheckpointError, match="damaged.*state"):
        _checkpoint_to_load(config(tmp_path, "resume_path", str(folder)))
