"""Console tracker: one line a step.

When a launcher listens (see `rlflow.observe.feed`) the numbers go there and its live table shows them; otherwise this
process writes the line itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlflow.observe.feed import current_feed
from rlflow.observe.live import LiveTable
from rlflow.observe.tracking.backend import RunInfo, Sample
from rlflow.observe.tracking.values import numbers


class ConsoleBackend:
    """Sends the numbers of a step to the terminal."""

    def __init__(self, info: RunInfo) -> None:
        self._feed = current_feed()
        self._table = LiveTable() if self._feed is None else None

    def log(self, data: dict[str, Any], step: int) -> None:
        """Show the numbers of a step."""
        shown = {name: float(value) for name, value in numbers(data).items()}
        self._send({"type": "step", "step": step, "data": shown})

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Show validation samples."""
        self._send({"type": "samples", "step": step, "samples": list(samples)})

    def finish(self, exit_code: int) -> None:
        """End the table."""
        self._send({"type": "finish", "exit_code": exit_code})

    def _send(self, event: dict[str, Any]) -> None:
        if self._feed is not None:
            self._feed.publish(event)
        elif self._table is not None:
            self._table.show(event)
