"""One run of a weight sync over several replicas: who is still part of it, and why others are not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rlflow.checkpoint_engine.phases import Phase, PhaseClock, PhaseTimeouts
from rlflow.utils.errors import WeightSyncError

logger = logging.getLogger(__name__)


class SyncRun:
    """A replica that fails leaves the run, so that it stops nobody else; `finish` reports all of them at once.

    Attributes:
        replicas: still part of it.
        failures: by replica rank.
        clock: times and deadlines of the phases.
        partial: only some of the managed replicas were asked for; the others hold the version already.
    """

    def __init__(
        self, version: int, timeouts: PhaseTimeouts, replicas: Sequence[Any], *, partial: bool = False
    ) -> None:
        self.version, self.timeouts, self.partial = version, timeouts, partial
        self.all = list(replicas)
        self.replicas = list(replicas)
        self.failures: dict[int, WeightSyncError] = {}
        self.clock = PhaseClock(timeouts, f"Weight version {version}")

    async def each(
        self, phase: Phase, call: Callable[[Any], Awaitable[Any]], *, replicas: Sequence[Any] | None = None
    ) -> list[Any]:
        """Call for every replica at once, each within the deadline of the phase; the answers of those that gave one."""
        asked = list(self.replicas if replicas is None else replicas)
        started = time.perf_counter()
        limit = self.timeouts.of(phase)
        results = await asyncio.gather(
            *(asyncio.wait_for(call(replica), limit) for replica in asked), return_exceptions=True
        )
        seconds = self.clock.seconds
        seconds[phase.value] = seconds.get(phase.value, 0.0) + time.perf_counter() - started
        answers = []
        for replica, result in zip(asked, results, strict=True):
            if isinstance(result, BaseException):
                self.fail(replica, phase, result)
            else:
                answers.append(result)
        return answers

    def fail(self, replica: Any, phase: Phase, error: BaseException) -> None:
        """This replica is out; the first reason counts."""
        if not isinstance(error, (Exception, asyncio.CancelledError)):
            raise error
        rank = replica.replica_rank
        found = error if isinstance(error, WeightSyncError) else _named(error, phase, self.timeouts)
        found.phase, found.replicas = found.phase or phase.value, (rank,)
        self.failures.setdefault(rank, found)
        self.replicas = [r for r in self.replicas if r.replica_rank != rank]
        logger.error("rollout replica %d left the sync of version %d in `%s`: %s", rank, self.version, phase, found)

    def finish(self) -> None:
        """Raises:
        WeightSyncError: of all replicas that failed: phase of the first, ranks, tensors; `lost` if all were lost.
        """
        if not self.failures:
            return
        errors = list(self.failures.values())
        text = "; ".join(f"rollout replica {rank} in `{e.phase}`: {e}" for rank, e in self.failures.items())
        left = f"The other {len(self.replicas)} serve it." if self.replicas else "No replica serves it."
        raise WeightSyncError(
            f"Weight version {self.version} did not reach {text} {left}",
            phase=errors[0].phase,
            replicas=tuple(self.failures),
            tensors=tuple(name for error in errors for name in error.tensors),
            lost=all(error.lost for error in errors),
        ) from errors[0]


def _named(error: BaseException, phase: Phase, timeouts: PhaseTimeouts) -> WeightSyncError:
    if isinstance(error, TimeoutError):
        text = str(error) or (
            f"no answer within {timeouts.of(phase):g} s (rollout.checkpoint_engine.{phase.value}_timeout_s)"
        )
        return WeightSyncError(f"{text}.", phase=phase.value, lost=True)
    return WeightSyncError(f"{type(error).__name__}: {error}", phase=phase.value, lost=_is_death(error))


def _is_death(error: BaseException | None) -> bool:
    from ray.exceptions import RayActorError

    while error is not None:
        if isinstance(error, RayActorError):
            return True
        error = error.__cause__
    return False
