"""The phases of a weight sync, their deadlines and their times.

pause ──> prepare ──> transfer ──> verify ──> commit ──> resume
^
(whatever fails)  ─────────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from rlflow.utils.errors import WeightSyncError


class Phase(Enum):
    """Steps of a sync, in order."""

    PAUSE = "pause"  # requests end; none is admitted
    PREPARE = "prepare"  # both ends get ready: process groups, caches, the server's books
    TRANSFER = "transfer"  # the bytes
    VERIFY = "verify"  # receipts, names, checksums, canary
    COMMIT = "commit"  # every replica says that it serves the version
    RESUME = "resume"  # requests are admitted, or refused with the reason


@dataclass(frozen=True)
class PhaseTimeouts:
    """Seconds that each phase may take (`rollout.checkpoint_engine.*_timeout_s`)."""

    pause: float = 120.0
    prepare: float = 120.0
    transfer: float = 600.0
    verify: float = 300.0
    commit: float = 60.0
    resume: float = 60.0

    @classmethod
    def from_config(cls, config: Any) -> PhaseTimeouts:
        """Read the keys `<phase>_timeout_s`; an absent or null one keeps the default."""
        given = {entry.name: config.get(f"{entry.name}_timeout_s", None) for entry in fields(cls)}
        return cls(**{name: float(value) for name, value in given.items() if value is not None})

    def of(self, phase: Phase) -> float:
        """Deadline of a phase."""
        return float(getattr(self, phase.value))


@dataclass
class PhaseClock:
    """Runs phases within their deadlines and keeps their seconds.

    Args:
        what: is going on, for messages ("weight version 7").
    """

    timeouts: PhaseTimeouts
    what: str
    seconds: dict[str, float] = field(default_factory=dict)

    @asynccontextmanager
    async def phase(self, phase: Phase) -> AsyncIterator[None]:
        """Bound what happens inside the block.

        Raises:
            WeightSyncError: the deadline is over; or one from inside, with the phase added where it had none.
        """
        started, limit = time.perf_counter(), self.timeouts.of(phase)
        try:
            async with asyncio.timeout(limit):
                yield
        except WeightSyncError as error:
            error.phase = error.phase or phase.value
            raise
        except TimeoutError as error:
            raise WeightSyncError(
                f"{self.what}: `{phase.value}` got no answer within {limit:g} s "
                f"(rollout.checkpoint_engine.{phase.value}_timeout_s). {error}".strip(),
                phase=phase.value,
                lost=True,
            ) from error
        finally:
            self.seconds[phase.value] = self.seconds.get(phase.value, 0.0) + time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """`<phase>_s` of the phases so far."""
        return {f"{name}_s": value for name, value in self.seconds.items()}
