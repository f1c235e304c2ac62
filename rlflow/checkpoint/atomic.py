"""A folder that appears whole under its name, or not at all.

Invariants
    - Under the final name there is never a folder without a manifest, whenever the process dies.
    - What the manifest names has reached the disk before the rename: files first, then folders, then the parent.
    - Work in progress has a name that starts with a dot and ends in `WORK_SUFFIX`; whoever finds one of a dead process
      may delete it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlflow.checkpoint.manifest import MANIFEST, write_manifest
from rlflow.utils.errors import CheckpointError

WORK_SUFFIX = ".tmp"
TRASH_SUFFIX = ".old"


def work_path(final: Path) -> Path:
    """Where `final` is built: beside it, so that the rename stays within one file system."""
    return final.parent / f".{final.name}{WORK_SUFFIX}"


@contextlib.contextmanager
def atomic_directory(final: Path | str) -> Iterator[Path]:
    """Build a folder under a temporary name; on success write its manifest, sync it and rename it to `final`.

    An exception inside removes the temporary folder and leaves an older `final` untouched. A folder that already has
    the name is replaced. Several processes may write below the yielded path; the one that holds the context must be the
    only one for this `final`, and must leave it only after all of them are done.

    Raises:
        CheckpointError: the disk is full or refuses; the message names the folder.
    """
    final = Path(final)
    work = work_path(final)
    try:
        shutil.rmtree(work, ignore_errors=True)  # left by a process that died
        work.mkdir(parents=True)
        yield work
        if not (work / MANIFEST).exists():
            write_manifest(work)
        fsync_tree(work)
        _replace(work, final)
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        hint = "; the disk is full" if error.errno == errno.ENOSPC else ""
        raise CheckpointError(f"checkpoint {final} was not written{hint}: {error}") from error
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _replace(work: Path, final: Path) -> None:
    """Rename over `final`. It takes two renames, between which there is no folder of that name."""
    trash = final.parent / f".{final.name}{TRASH_SUFFIX}"
    shutil.rmtree(trash, ignore_errors=True)
    if final.exists():
        os.rename(final, trash)
    os.rename(work, final)
    fsync_path(final.parent)
    shutil.rmtree(trash, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Delete a folder so that no half of it is ever seen under its name."""
    trash = folder.parent / f".{folder.name}{TRASH_SUFFIX}"
    shutil.rmtree(trash, ignore_errors=True)
    os.rename(folder, trash)
    shutil.rmtree(trash, ignore_errors=True)


def remove_leftovers(root: Path) -> None:
    """Delete temporary folders of saves and deletions that were killed. No save may be running below `root`."""
    if root.is_dir():
        for entry in root.iterdir():
            if entry.name.startswith(".") and entry.name.endswith((WORK_SUFFIX, TRASH_SUFFIX)) and entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)


def atomic_write_text(path: Path, text: str) -> None:
    """Write a file so that readers see the old or the new content, also after a crash."""
    work = path.with_name(f".{path.name}{WORK_SUFFIX}")
    with open(work, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(work, path)
    fsync_path(path.parent)


def fsync_tree(folder: Path) -> None:
    """Bring all files below `folder`, then the folders that name them, to the disk."""
    for directory, _, files in os.walk(folder, topdown=False):
        for name in files:
            fsync_path(Path(directory) / name)
        fsync_path(Path(directory))


def fsync_path(path: Path) -> None:
    """`fsync` of one file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
