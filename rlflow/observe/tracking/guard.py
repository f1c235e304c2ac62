"""What stands between a run and its trackers: a tracker that fails never stops training.

    Guard         calls the tracker at once (console, file): it is local, and a line is on disk when `log` returns
    Background    calls it in a thread of its own, in order: servers may be slow or away

The first failure of a tracker is said once when it happens, the number of lost calls again at the end.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlflow.observe.feed import notice
from rlflow.observe.tracking.backend import Backend, Sample
from rlflow.utils.redact import redact_text

logger = logging.getLogger(__name__)

# A tracker that hangs must not collect the numbers of a whole run in memory.
MAX_WAITING = 2_000
Call = Callable[[Backend], None]


class Guard:
    """One tracker, called at once.

    Args:
        name: its name in `trainer.logger`.
        make: builds the tracker; what it raises, the constructor raises.
    """

    def __init__(self, name: str, make: Callable[[], Backend]) -> None:
        self.name = name
        self.calls = 0
        self.lost = 0
        self._reason = ""
        self._start(make)

    def _start(self, make: Callable[[], Backend]) -> None:
        self.backend: Backend | None = make()

    def log(self, data: dict[str, Any], step: int) -> None:
        """Record numbers."""
        self._do(lambda backend: backend.log(data, step))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Record validation samples."""
        self._do(lambda backend: backend.log_samples(samples, step))

    def request_finish(self, exit_code: int) -> None:
        """Begin to close."""
        self._do(lambda backend: backend.finish(exit_code))

    def wait_finished(self, deadline: float) -> None:
        """Wait until it is closed, at most to `deadline` (`time.monotonic`); tells about what was lost."""
        self._tell_losses()

    def _do(self, call: Call) -> None:
        self.calls += 1
        self._run(call)

    def _run(self, call: Call) -> None:
        if self.backend is None:
            self.lost += 1
            return
        try:
            call(self.backend)
        except Exception as error:  # noqa: BLE001 - code of other people, over a network; training goes on without it
            self.lost += 1
            self._failed("failed", error)

    def _failed(self, what: str, error: BaseException) -> None:
        logger.debug("tracker %s %s", self.name, what, exc_info=error)
        lines = str(error).strip().splitlines() or [""]
        first, self._reason = not self._reason, redact_text(f"{type(error).__name__}: {lines[0][:300]}")
        if first:
            notice(f"tracker {self.name} {what} ({self._reason}); the run goes on without it")

    def _tell_losses(self) -> None:
        if self.lost:
            notice(f"tracker {self.name}: {self.lost} of {self.calls} calls were lost ({self._reason})")


class Background(Guard):
    """One tracker, called in a daemon thread. Building it happens there too and may fail like any call."""

    def _start(self, make: Callable[[], Backend]) -> None:
        self.backend = None
        self._waiting: queue.Queue[Call | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._work, args=(make,), name=f"tracker-{self.name}", daemon=True)
        self._thread.start()

    def _work(self, make: Callable[[], Backend]) -> None:
        try:
            self.backend = make()
        except BaseException as error:  # noqa: BLE001 - as in `_run`; some of them end the process with SystemExit
            self._failed("did not start", error)
        while (call := self._waiting.get()) is not None:
            self._run(call)

    def _do(self, call: Call) -> None:
        self.calls += 1
        try:
            self._waiting.put_nowait(call)
        except queue.Full:
            self.lost += 1
            self._failed("does not keep up", TimeoutError(f"{MAX_WAITING} calls are waiting"))

    def request_finish(self, exit_code: int) -> None:
        """Begin to close, after what is still waiting."""
        super().request_finish(exit_code)
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            pass  # it hangs; `wait_finished` says so

    def wait_finished(self, deadline: float) -> None:
        """Wait for the thread; what is not sent by the deadline is given up."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self.lost += self._waiting.qsize()
            self._reason = self._reason or "still sending when the run ended"
            notice(f"tracker {self.name} is still sending; it is left behind")
        self._tell_losses()
