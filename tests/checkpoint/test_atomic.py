"""A checkpoint is whole or not there, whatever happens while it is written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from rlflow.checkpoint import (
    MANIFEST,
    TRACKER,
    atomic_directory,
    checkpoint_step,
    find_latest_checkpoint,
    list_checkpoints,
    prune,
    read_tracker,
    step_folder,
    verify_manifest,
    write_manifest,
    write_tracker,
)
from rlflow.utils.errors import CheckpointError


def save(root, step, text="weights"):
    with atomic_directory(step_folder(root, step)) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "model.bin").write_text(text * 100)
        (folder / "trainer.json").write_text("{}")
    write_tracker(root, step)
    return step_folder(root, step)


def names(root):
    return sorted(p.name for p in root.iterdir())


def test_a_saved_folder_is_whole_and_alone(tmp_path):
    folder = save(tmp_path, 3)
    assert verify_manifest(folder) == []
    assert names(tmp_path) == ["global_step_3", TRACKER]
    assert find_latest_checkpoint(tmp_path) == folder
    assert read_tracker(tmp_path) == checkpoint_step(folder) == 3


def test_an_exception_leaves_nothing_behind(tmp_path):
    with pytest.raises(RuntimeError, match="boom"), atomic_directory(step_folder(tmp_path, 1)) as folder:
        (folder / "half").write_text("x")
        raise RuntimeError("boom")
    assert names(tmp_path) == []


def test_a_failed_save_keeps_the_folder_that_was_there(tmp_path):
    folder = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="global_step_1.*full"), atomic_directory(folder):
        raise OSError(28, "No space left on device")
    assert verify_manifest(folder) == []
    assert find_latest_checkpoint(tmp_path) == folder


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 1, "old")
    folder = save(tmp_path, 1, "new")
    assert (folder / "actor" / "model.bin").read_text().startswith("new")
    assert verify_manifest(folder) == []
    assert names(tmp_path) == ["global_step_1", TRACKER]


@pytest.mark.parametrize("hashes", [True, False])
def test_damage_is_found_and_named(tmp_path, hashes):
    folder = save(tmp_path, 1)
    target = folder / "actor" / "model.bin"
    content = target.read_bytes()
    target.write_bytes(content[:-1])
    assert len(problems := verify_manifest(folder, hashes=hashes)) == 1
    assert "model.bin" in problems[0] and "bytes" in problems[0]
    target.unlink()
    assert "missing" in verify_manifest(folder, hashes=hashes)[0]
    flipped = bytearray(content)
    flipped[7] ^= 1
    target.write_bytes(bytes(flipped))
    assert bool(verify_manifest(folder, hashes=hashes)) == hashes
    target.write_bytes(content)
    assert verify_manifest(folder) == []
    for broken in ("{", '{"format": 1}', '{"format": 9, "files": {}}'):
        (folder / MANIFEST).write_text(broken)
        assert MANIFEST in verify_manifest(folder)[0]


def test_damaged_checkpoints_are_passed_over_with_a_warning(tmp_path, caplog):
    good = save(tmp_path, 1)
    for step in (2, 3):
        save(tmp_path, step)
    (tmp_path / "global_step_3" / "trainer.json").unlink()
    (tmp_path / "global_step_2" / "actor" / "model.bin").write_text("weightz" * 100)
    assert find_latest_checkpoint(tmp_path) == good
    assert "global_step_3/trainer.json" in caplog.text
    assert "global_step_2/actor/model.bin" in caplog.text


def test_the_tracker_bounds_the_search(tmp_path, caplog):
    old = save(tmp_path, 1)
    new = save(tmp_path, 2)
    write_tracker(tmp_path, 1)
    assert find_latest_checkpoint(tmp_path) == old
    write_tracker(tmp_path, 9)
    assert find_latest_checkpoint(tmp_path) == new
    assert "step 9" in caplog.text
    (tmp_path / TRACKER).write_text("nonsense")
    assert find_latest_checkpoint(tmp_path) == new
    (tmp_path / TRACKER).unlink()
    assert find_latest_checkpoint(tmp_path) == new
    assert find_latest_checkpoint(tmp_path / "nowhere") is None


def test_prune_keeps_the_newest_whole_ones(tmp_path):
    for step in (1, 2, 10, 20):
        save(tmp_path, step)
    (tmp_path / "global_step_20" / "trainer.json").unlink()
    assert [p.name for p in prune(tmp_path, 1)] == ["global_step_2", "global_step_1"]
    assert [p.name for p in list_checkpoints(tmp_path)] == ["global_step_20", "global_step_10"]
    assert prune(tmp_path, None) == prune(tmp_path, 0) == []


def test_prune_never_deletes_the_last_whole_one(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    for step in (2, 3):
        (tmp_path / f"global_step_{step}" / MANIFEST).unlink()
    assert prune(tmp_path, 1) == []
    assert find_latest_checkpoint(tmp_path) == tmp_path / "global_step_1"


def test_other_folders_are_left_alone(tmp_path):
    for name in ("global_step_x", "runs", "xglobal_step_1"):
        (tmp_path / name).mkdir()
    save(tmp_path, 1)
    save(tmp_path, 2)
    prune(tmp_path, 1)
    assert {"global_step_x", "runs", "xglobal_step_1"} <= set(names(tmp_path))
    with pytest.raises(CheckpointError, match="global_step_<number>"):
        checkpoint_step(tmp_path / "runs")


KILLED = """
import os, signal, sys
from pathlib import Path
from rlflow.checkpoint import atomic, manifest
from rlflow.checkpoint import atomic_directory, step_folder, write_tracker
root, point = Path(sys.argv[1]), sys.argv[2]
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
def before(module, name):
    setattr(module, name, die)
def after(module, name):
    real = getattr(module, name)
    def call(*a, **k):
        real(*a, **k); die()
    setattr(module, name, call)
{"manifest": lambda: before(atomic, "write_manifest"),
 "sync": lambda: before(atomic, "fsync_tree"),
 "rename": lambda: before(atomic, "_replace"),
 "renamed": lambda: after(atomic, "_replace"),
 "first rename": lambda: after(atomic.os, "rename"),
 "tracker": lambda: before(atomic.os, "replace"),
 "body": lambda: None}[point]()
with atomic_directory(step_folder(root, 2)) as folder:
    (folder / "a.bin").write_text("x" * 1000)
    if point == "body": die()
    (folder / "b.bin").write_text("y" * 1000)
write_tracker(root, 2)
"""


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("point", ["body", "manifest", "sync", "rename", "first rename", "renamed", "tracker"])
def test_a_killed_save_never_leaves_a_half(tmp_path, point, again):
    """SIGKILL at every stage, for a new step and for one that exists already."""
    save(tmp_path, 1)
    if again:
        save(tmp_path, 2)
        write_tracker(tmp_path, 1)
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), point]
    run = subprocess.run(command, cwd=os.getcwd(), timeout=60)
    assert run.returncode == -signal.SIGKILL
    for folder in list_checkpoints(tmp_path):
        assert verify_manifest(folder) == []
    assert find_latest_checkpoint(tmp_path) == tmp_path / "global_step_1"
    save(tmp_path, 3)
    prune(tmp_path, 2)
    assert not [name for name in names(tmp_path) if name.startswith(".")]
    assert find_latest_checkpoint(tmp_path) == tmp_path / "global_step_3"


def test_the_manifest_covers_all_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x").write_text("1")
    write_manifest(tmp_path)
    (tmp_path / "later").write_text("not listed, not damage")
    assert verify_manifest(tmp_path) == []
