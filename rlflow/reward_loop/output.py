"""What a scorer process writes to its stdout and stderr: shown within limits, remembered for messages.

Invariant: whatever a scorer prints, it never waits for a reader, and it cannot flood the log.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from rlflow.utils.redact import redact_text

logger = logging.getLogger(__name__)

# A scorer may say this many lines at once, and goes on at this pace.
BURST_LINES = 100
LINES_PER_SECOND = 1.0
LINE_CHARS = 1000
TAIL_LINES = 10
TAIL_CHARS = 200


class ScorerOutput:
    """Takes the bytes of one process as they come.

    Args:
        name: of the process, in front of each line.
        clock: seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._allowance = float(BURST_LINES)
        self._asked = clock()
        self._left_out = 0
        self._rest = b""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def feed(self, data: bytes) -> None:
        """More output; whole lines are shown."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_CHARS:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._line(line)

    def close(self) -> None:
        """The process is gone."""
        if self._rest:
            self._line(self._rest)
            self._rest = b""
        if self._left_out:
            logger.warning("%s: %d lines of output left out", self._name, self._left_out)
            self._left_out = 0

    def tail(self) -> str:
        """The last lines, for an error message; empty when there was no output."""
        return "\n".join(self._tail)

    def _line(self, raw: bytes) -> None:
        # The decoder of a broken encoding must not end the reader of the output.
        text = redact_text(raw[:LINE_CHARS].decode("utf-8", "backslashreplace").rstrip())
        if not text:
            return
        self._tail.append(text[:TAIL_CHARS])
        now = self._clock()
        self._allowance = min(BURST_LINES, self._allowance + (now - self._asked) * LINES_PER_SECOND)
        self._asked = now
        if self._allowance < 1:
            self._left_out += 1
            return
        self._allowance -= 1
        if self._left_out:
            logger.warning("%s: %d lines of output left out", self._name, self._left_out)
            self._left_out = 0
        logger.warning("%s: %s", self._name, text)
