"""Checkpoint files written in a thread, from a copy of the state, while training goes on.

    CheckpointWriter(in_background=True).write(files, folder, rank)    copies; returns {folder}/.written_00003
    BackgroundFiles([...], timeout_s).wait()                           whoever waits for all ranks

A rank says that it is done by a file, because it serves other calls meanwhile: `.writing_{rank}` is there from the
start, with room for a message, and becomes `.written_{rank}` at the end; so not even a full disk keeps the end from
being told. What the file holds besides blanks is the error.

Invariants
    - A rank writes one checkpoint at a time.
    - What is written is the state at the moment of `write`, whatever happens to it later.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlflow.checkpoint.shards import PendingFile
from rlflow.utils.errors import CheckpointError

logger = logging.getLogger(__name__)

_ROOM = 4096
_POLL_S = 0.05


class CheckpointWriter:
    """Writes the files of one rank.

    Args:
        in_background: `write` returns when the files' contents are copied.
        timeout_s: how long a save may wait for the end of the one before.
    """

    def __init__(self, *, in_background: bool, timeout_s: float = 600.0) -> None:
        self._in_background, self._timeout_s = in_background, timeout_s
        self._thread: threading.Thread | None = None

    def write(self, files: Iterable[PendingFile], folder: Path, rank: int) -> Path | None:
        """Write `files` now, or a copy of them in a thread.

        Args:
            files: an iterator that may be a collective; it is run to its end here.
            folder: the rank's folder, where the end is told.
            rank: whose files they are.

        Returns:
            None when everything is written, else the file that appears once it is.

        Raises:
            OSError, CheckpointError: the disk refuses. A thread tells it by its file.
        """
        self.wait()
        if not self._in_background:
            for file in files:
                file.write()
            return None
        copies = [file.snapshot() for file in files]
        writing, written = folder / f".writing_{rank:05d}", folder / f".written_{rank:05d}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            writing.write_text(" " * _ROOM)
        except OSError as error:
            raise CheckpointError(f"{writing} was not written: {error}") from error
        self._thread = threading.Thread(target=_write_all, args=(copies, writing, written), daemon=True)
        self._thread.start()
        return written

    def wait(self) -> None:
        """Until the save before, if there is one, is over; `CheckpointError` when that takes too long."""
        if self._thread is not None:
            self._thread.join(self._timeout_s)
            if self._thread.is_alive():
                raise CheckpointError(
                    f"the save before is still being written after {self._timeout_s:.0f} s "
                    "(actor_rollout_ref.nccl_timeout). The disk is too slow, or it hangs: save less often, or elsewhere"
                )
            self._thread = None


def _write_all(files: list[PendingFile], writing: Path, written: Path) -> None:
    message = ""
    try:
        while files:
            files.pop(0).write()  # and let its memory go
    except Exception as error:  # noqa: BLE001 - told by the file; a thread has no caller to raise to
        message = str(error) or type(error).__name__
        logger.warning("a checkpoint could not be written in the background: %s", message)
    try:
        with writing.open("r+b") as stream:
            stream.write(message.encode()[:_ROOM])
        os.rename(writing, written)
    except OSError as error:
        logger.warning("the end of a background save could not be told at %s: %s", written, error)


class BackgroundFiles:
    """The ends of the background writes of all ranks.

    Args:
        marks: the files that `CheckpointWriter.write` returned.
        timeout_s: how long to wait for them.
    """

    def __init__(self, marks: Sequence[Path], timeout_s: float) -> None:
        self._marks = list(marks)
        self._timeout_s = timeout_s
        self._given_up = threading.Event()

    def wait(self) -> None:
        """Until all ranks are done; their marks are gone then.

        Raises:
            CheckpointError: a rank could not write, or did not end in time, or `give_up` was called.
        """
        end = time.monotonic() + self._timeout_s
        for mark in self._marks:
            while not mark.exists():
                if self._given_up.wait(_POLL_S):
                    raise CheckpointError(f"nobody waits for {mark} any more")
                if time.monotonic() > end:
                    raise CheckpointError(
                        f"{mark} did not appear in {self._timeout_s:.0f} s: that rank has not written its part. "
                        "trainer.call_timeout_s is the limit; a disk that several nodes share is needed"
                    )
            message = mark.read_text(encoding="utf-8", errors="replace").strip()
            if message:
                raise CheckpointError(f"{mark.parent.name}, rank {int(mark.name[-5:])}: {message}")
            mark.unlink()

    def give_up(self) -> None:
        """Let `wait` end."""
        self._given_up.set()
