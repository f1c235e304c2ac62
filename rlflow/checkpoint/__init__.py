"""Checkpoints on disk that are whole or not there.

with atomic_directory(root / "global_step_10") as folder:
    ...                                  # all processes write below `folder`
write_tracker(root, 10)                  # only now is it the latest
prune(root, keep=3)

folder = find_latest_checkpoint(root)    # the newest whole one, or None
"""

from __future__ import annotations

from rlflow.checkpoint.atomic import PendingDirectory, atomic_directory, atomic_write_text, fsync_tree, remove_leftovers
from rlflow.checkpoint.manifest import MANIFEST, verify_manifest, write_manifest
from rlflow.checkpoint.retention import (
    TRACKER,
    checkpoint_step,
    find_latest_checkpoint,
    list_checkpoints,
    prune,
    read_tracker,
    step_folder,
    write_tracker,
)

__all__ = [
    "MANIFEST",
    "TRACKER",
    "PendingDirectory",
    "atomic_directory",
    "atomic_write_text",
    "checkpoint_step",
    "find_latest_checkpoint",
    "fsync_tree",
    "list_checkpoints",
    "prune",
    "read_tracker",
    "remove_leftovers",
    "step_folder",
    "verify_manifest",
    "write_manifest",
    "write_tracker",
]
