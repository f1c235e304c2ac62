"""A checkpoint between "its state is taken" and "it counts".

    prepared = PreparedCheckpoint(pending, step, marks, timeout_s)
    ...                                      # the run goes on
    if prepared.result(): prepared.pending.commit()

Without marks everything is written already and brought to the disk at once. With them a thread waits for the worker
processes, then writes the manifest and syncs; the folder keeps its hidden name all the while.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from rlflow.checkpoint import PendingDirectory
from rlflow.checkpoint.background import BackgroundFiles
from rlflow.utils.errors import CheckpointError


class PreparedCheckpoint:
    """The folder of one step in the making.

    Args:
        pending: where it is built.
        step: whose state it is.
        marks: files that tell the end of what processes write in the background.
        timeout_s: how long they may take.
    """

    def __init__(self, pending: PendingDirectory, step: int, marks: Sequence[Path], timeout_s: float) -> None:
        self.pending = pending
        self.step = step
        self.in_background = bool(marks)
        self._files = BackgroundFiles(marks, timeout_s)
        self._error: BaseException | None = None
        self._unclaimed = threading.Lock()
        self._thread: threading.Thread | None = None
        if self.in_background:
            self._thread = threading.Thread(target=self._complete, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            pending.prepare()

    def _complete(self) -> None:
        try:
            with self.pending.explained():
                self._files.wait()
            self.pending.prepare()
        except CheckpointError as error:
            self._error = CheckpointError(f"the background save of step {self.step} failed: {error}")
        except BaseException as error:  # noqa: BLE001 - raised by `result`, in the thread of the run
            self._error = error

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._thread is None or not self._thread.is_alive()

    def claim(self) -> bool:
        """True for the first caller: the thread of the run and the one that ends it may both want to commit it."""
        return self._unclaimed.acquire(blocking=False)

    def result(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; whether everything is on the disk. After `timeout_s` it is given up.

        Raises:
            CheckpointError: something could not be written; the folder is gone.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self._files.give_up()
                return False
        if self._error is not None:
            raise self._error
        return True
