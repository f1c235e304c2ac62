"""Watches the controller's own thread: a stage that never ends, whatever hangs in it, ends the run.

The waits inside a stage have deadlines of their own, with better messages. This is for what has none: a user's
estimator in an endless loop, a tracker whose server does not answer. Progress is that the thread stands elsewhere than
before, or that something was reported meanwhile.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from types import FrameType

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0
SHOWN_FRAMES = 8


class Watchdog:
    """Looks at a thread until it is stopped.

    Args:
        thread_id: of the thread.
        limit_s: seconds without progress.
        progress: a value that changes with progress, beside the thread's place.
        on_stall: called once with the report, from the watchdog's own thread.
        look_every_s: seconds between two looks.
    """

    def __init__(
        self,
        thread_id: int,
        limit_s: float,
        progress: Callable[[], Hashable],
        on_stall: Callable[[str], None],
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._thread_id, self._limit_s = thread_id, limit_s
        self._progress, self._on_stall = progress, on_stall
        self._every_s = min(look_every_s, limit_s / 4)
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def _watch(self) -> None:
        seen: Hashable = None
        since = time.monotonic()
        while not self._stopped.wait(timeout=self._every_s):
            frame = sys._current_frames().get(self._thread_id)
            if frame is None:
                return
            now = (self._progress(), _place(frame))
            quiet = time.monotonic() - since
            if now != seen:
                seen, since = now, time.monotonic()
            elif quiet >= self._limit_s:
                self._on_stall(self._report(frame, quiet))
                return

    def _report(self, frame: FrameType, quiet: float) -> str:
        stack = [entry for entry in traceback.extract_stack(frame) if "/ray/" not in entry.filename]
        lines = [f"    | {entry.filename}:{entry.lineno} in {entry.name}" for entry in stack[-SHOWN_FRAMES:]]
        return "\n".join(
            [
                f"Stalled {quiet:.0f} s in the controller: its thread stands still, here (innermost last)",
                *lines,
                "    next:  the run ends (trainer.call_timeout_s and a margin bound every stage)",
            ]
        )


def _place(frame: FrameType) -> Hashable:
    places = []
    walk: FrameType | None = frame
    while walk is not None:
        places.append((walk.f_code, walk.f_lasti))
        walk = walk.f_back
    return tuple(places)
