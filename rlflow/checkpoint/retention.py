"""Which checkpoints of a run exist, which is the latest whole one, and which may go.

    <root>/
        latest_checkpointed_iteration.txt     the step of the latest checkpoint
        global_step_10/                       one checkpoint, with a manifest

Everything is read from the disk at each call, so that a restarted run knows as much as the one before.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path

from rlflow.checkpoint.atomic import atomic_write_text, remove_folder, remove_leftovers
from rlflow.checkpoint.manifest import verify_manifest
from rlflow.utils.errors import CheckpointError

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"global_step_(\d+)")


def step_folder(root: Path | str, step: int) -> Path:
    """Folder of the checkpoint of one step."""
    return Path(root) / f"global_step_{step}"


def checkpoint_step(folder: Path | str) -> int:
    """The step in a checkpoint folder's name; `CheckpointError` when it has none."""
    match = _NAME.fullmatch(Path(folder).name)
    if match is None:
        raise CheckpointError(f"{folder} is no checkpoint folder; they are called global_step_<number>")
    return int(match.group(1))


def list_checkpoints(root: Path | str) -> list[Path]:
    """Checkpoint folders below `root`, the newest first, whole or not."""
    root = Path(root)
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=checkpoint_step, reverse=True)


def write_tracker(root: Path | str, step: int) -> None:
    """Make `step` the latest checkpoint; its folder must be whole by now. `CheckpointError` when the disk refuses."""
    try:
        atomic_write_text(Path(root) / TRACKER, f"{step}\n")
    except OSError as error:
        raise CheckpointError(
            f"{Path(root) / TRACKER} was not written, so step {step} does not count: {error}"
        ) from error


def read_tracker(root: Path | str) -> int | None:
    """The step of the latest checkpoint; None without a tracker, with a warning when it is unreadable."""
    path = Path(root) / TRACKER
    try:
        return int(path.read_text().strip())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s is unreadable (%s); looking for the newest whole checkpoint instead", path, error)
        return None


def find_latest_checkpoint(root: Path | str) -> Path | None:
    """The newest whole checkpoint that is not newer than the tracker says; None when there is none.

    Without a readable tracker every folder counts. Damaged folders are passed over with a warning that names the file.
    """
    latest = read_tracker(root)
    folders = list_checkpoints(root)
    if latest is not None and latest not in [checkpoint_step(folder) for folder in folders]:
        missing = step_folder(root, latest)
        logger.warning("%s names step %d, but %s does not exist", Path(root) / TRACKER, latest, missing)
    for folder in folders:
        if latest is not None and checkpoint_step(folder) > latest:
            continue
        problems = verify_manifest(folder)
        if not problems:
            return folder
        more = f" and {len(problems) - 1} more problems" if len(problems) > 1 else ""
        logger.warning("passing over checkpoint %s: %s%s", folder, problems[0], more)
    return None


def prune(root: Path | str, keep: int | None, protect: Iterable[int] = ()) -> list[Path]:
    """Delete the oldest checkpoints so that `keep` whole ones stay (None or 0: all); returns the deleted folders.

    Damaged folders do not count as kept, so that the last whole one is never deleted. Leftovers of killed saves go too;
    call it between saves.

    Args:
        root: the run folder.
        keep: how many of the newest stay.
        protect: steps that stay besides those: the best one.
    """
    root = Path(root)
    remove_leftovers(root)
    if not keep or keep < 0:
        return []
    whole, deleted, protected = 0, [], set(protect)
    for folder in list_checkpoints(root):
        if whole >= keep and checkpoint_step(folder) in protected:
            continue
        if whole >= keep:
            remove_folder(folder)
            deleted.append(folder)
        # Sizes only: reading every kept checkpoint back after every save would cost more than the save.
        elif not verify_manifest(folder, hashes=False):
            whole += 1
    return deleted
