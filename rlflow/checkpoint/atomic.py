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
from rlflow.utils.disk import fsync_path
from rlflow.utils.errors import CheckpointError

WORK_SUFFIX = ".tmp"
TRASH_SUFFIX = ".old"
REPLACED_SUFFIX = ".replaced"


def work_path(final: Path) -> Path:
    """Where `final` is built: beside it, so that the rename stays within one file system."""
    return final.parent / f".{final.name}{WORK_SUFFIX}"


class PendingDirectory:
    """A folder in the making: write below `work`, then `prepare`, then `commit` gives it its name.

    Between `prepare` (everything is on the disk, under a hidden name) and `commit` (one rename) the caller may do what
    must not be lost once the folder counts. Several processes may write below `work`; the one that holds this object
    must be the only one for this `final`.
    """

    def __init__(self, final: Path | str) -> None:
        self.final = Path(final)
        self.work = work_path(self.final)
        with self.explained():
            shutil.rmtree(self.work, ignore_errors=True)  # left by a process that died
            self.work.mkdir(parents=True)

    def prepare(self) -> None:
        """Write the manifest, unless there is one, and bring everything to the disk.

        Raises:
            CheckpointError: the disk is full or refuses; the message names the folder, and nothing of it is left.
        """
        with self.explained():
            if not (self.work / MANIFEST).exists():
                write_manifest(self.work)
            fsync_tree(self.work)

    def commit(self) -> None:
        """Give the folder its name; an older one of that name is replaced.

        Raises:
            CheckpointError: as `prepare`.
        """
        with self.explained():
            _replace(self.work, self.final)

    def discard(self) -> None:
        """Forget it."""
        shutil.rmtree(self.work, ignore_errors=True)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """An error of the block removes what was written and says which checkpoint it was."""
        try:
            yield
        except OSError as error:
            self.discard()
            hint = "; the disk is full" if error.errno == errno.ENOSPC else ""
            raise CheckpointError(f"checkpoint {self.final} was not written{hint}: {error}") from error
        except BaseException:
            self.discard()
            raise

    @contextlib.contextmanager
    def filling(self) -> Iterator[Path]:
        """The block writes below the yielded path; an error removes what it wrote. Ends with `prepare`."""
        with self.explained():
            yield self.work
        self.prepare()


@contextlib.contextmanager
def atomic_directory(final: Path | str) -> Iterator[Path]:
    """Build a folder under a temporary name; on success write its manifest, sync it and rename it to `final`.

    An exception inside removes the temporary folder and leaves an older `final` untouched. See `PendingDirectory`.

    Raises:
        CheckpointError: the disk is full or refuses; the message names the folder.
    """
    pending = PendingDirectory(final)
    with pending.filling() as work:
        yield work
    pending.commit()


def _replace(work: Path, final: Path) -> None:
    """Rename over `final`.

    A folder that has the name already makes two renames of it; a process that dies between them leaves the old one as
    `REPLACED_SUFFIX`, which `remove_leftovers` puts back.
    """
    replaced = final.parent / f".{final.name}{REPLACED_SUFFIX}"
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        os.rename(final, replaced)
    os.rename(work, final)
    fsync_path(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Delete a folder so that no half of it is ever seen under its name."""
    trash = folder.parent / f".{folder.name}{TRASH_SUFFIX}"
    shutil.rmtree(trash, ignore_errors=True)
    os.rename(folder, trash)
    shutil.rmtree(trash, ignore_errors=True)


def remove_leftovers(root: Path) -> None:
    """Clean up after saves and deletions that were killed. No save may be running below `root`."""
    if not root.is_dir():
        return
    for entry in root.iterdir():
        if not (entry.name.startswith(".") and entry.is_dir()):
            continue
        if entry.name.endswith(REPLACED_SUFFIX):
            final = root / entry.name[1 : -len(REPLACED_SUFFIX)]
            if not final.exists():
                os.rename(entry, final)
                continue
        elif not entry.name.endswith((WORK_SUFFIX, TRASH_SUFFIX)):
            continue
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
