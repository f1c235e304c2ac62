"""Files written in the background: a copy of the state, an end that is told, an error that is told too."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlflow.checkpoint import PendingDirectory, verify_manifest
from rlflow.checkpoint import shards as shards_module
from rlflow.checkpoint.background import BackgroundFiles, CheckpointWriter
from rlflow.checkpoint.shards import PendingFile
from rlflow.trainer.ppo.background_save import PreparedCheckpoint
from rlflow.utils.errors import CheckpointError


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """safetensors files are written once it is open."""
    opened, write = threading.Event(), shards_module.save_file

    def when_open(*args: object, **kwargs: object) -> None:
        assert opened.wait(30)
        write(*args, **kwargs)

    monkeypatch.setattr(shards_module, "save_file", when_open)
    return opened


def files(folder: Path, live: torch.Tensor) -> list[PendingFile]:
    return [
        PendingFile(folder / "model" / "a.safetensors", tensors={"w": live}),
        PendingFile(folder / "meta.json", json={"step": 1}),
    ]


def test_the_state_of_the_moment_is_written_while_it_changes(tmp_path: Path, gate: threading.Event) -> None:
    live, writer = torch.zeros(4), CheckpointWriter(in_background=True)
    mark = writer.write(files(tmp_path, live), tmp_path, 3)
    assert mark == tmp_path / ".written_00003" and not mark.exists()
    live.fill_(7)
    gate.set()
    BackgroundFiles([mark], 30).wait()
    assert torch.equal(load_file(tmp_path / "model" / "a.safetensors")["w"], torch.zeros(4))
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["a.safetensors", "meta.json"]


def test_without_background_everything_is_there_at_once(tmp_path: Path) -> None:
    assert CheckpointWriter(in_background=False).write(iter(files(tmp_path, torch.ones(2))), tmp_path, 0) is None
    assert (tmp_path / "meta.json").is_file() and (tmp_path / "model" / "a.safetensors").is_file()


def test_a_save_waits_for_the_one_before(tmp_path: Path, gate: threading.Event) -> None:
    writer, live = CheckpointWriter(in_background=True), torch.zeros(2)
    first = writer.write(files(tmp_path / "1", live), tmp_path / "1", 0)
    threading.Timer(0.2, gate.set).start()
    second = writer.write(files(tmp_path / "2", live), tmp_path / "2", 0)
    assert first is not None and first.exists()
    assert second is not None
    writer.wait()
    assert second.exists()


def test_a_save_that_does_not_end_is_said(tmp_path: Path, gate: threading.Event) -> None:
    writer = CheckpointWriter(in_background=True, timeout_s=0.05)
    writer.write(files(tmp_path / "1", torch.zeros(2)), tmp_path / "1", 0)
    with pytest.raises(CheckpointError, match="still being written"):
        writer.wait()
    gate.set()


def test_a_rank_that_could_not_write_is_named_and_nothing_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards_module, "save_file", full)
    pending = PendingDirectory(tmp_path / "global_step_2")
    folder = pending.work / "actor"
    mark = CheckpointWriter(in_background=True).write(files(folder, torch.zeros(2)), folder, 1)
    assert mark is not None
    prepared = PreparedCheckpoint(pending, 2, [mark], 30)
    with pytest.raises(CheckpointError, match=r"background save of step 2 failed: actor, rank 1: .*No space left"):
        prepared.result()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_counts_only_when_all_ranks_are_done(tmp_path: Path, gate: threading.Event) -> None:
    pending = PendingDirectory(tmp_path / "global_step_2")
    marks = []
    for rank in (0, 1):
        folder = pending.work / "actor"
        rows = PendingFile(folder / f"rank_{rank}.safetensors", tensors={"w": torch.ones(2)})
        marks.append(CheckpointWriter(in_background=True).write([rows], folder, rank))
    prepared = PreparedCheckpoint(pending, 2, [mark for mark in marks if mark], 30)
    assert prepared.in_background and not prepared.done()
    assert not (tmp_path / "global_step_2").exists()
    gate.set()
    assert prepared.result()
    prepared.pending.commit()
    assert verify_manifest(tmp_path / "global_step_2") == []
    assert [path for path in (tmp_path / "global_step_2").rglob(".writ*")] == []
    assert prepared.claim() and not prepared.claim()


def test_a_save_that_is_given_up_or_too_slow_ends_the_wait(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\.written_00000 did not appear in 0 s"):
        BackgroundFiles([tmp_path / ".written_00000"], 0.1).wait()
    pending = PendingDirectory(tmp_path / "global_step_2")
    prepared = PreparedCheckpoint(pending, 2, [pending.work / ".written_00000"], 600)
    assert not prepared.result(0.2)
    with pytest.raises(CheckpointError, match="nobody waits"):
        prepared.result()
    assert not (tmp_path / "global_step_2").exists()
