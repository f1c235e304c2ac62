"""The requests of one server: who runs, who waits at the gate, and how both are ended.

    arrive ──gate──> running ──> answer
             closed while paused or asleep

The gate is ours and not the engine's, so that while it is closed the engine still answers what the server itself asks
(a canary prompt), and so that nothing is scheduled between a pause and a weight update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from rlflow.utils.errors import DeadlineError

_ABORT_POLL_S = 0.05
_ABORT_TIMEOUT_S = 120.0


class RequestGate:
    """See the module. Lives in one event loop.

    Args:
        abort: coroutine that ends requests in the engine by their ids; unknown ids are ignored.
    """

    def __init__(self, abort: Callable[[list[str]], Awaitable[Any]]) -> None:
        self._abort_in_engine = abort
        self._changed = asyncio.Condition()
        self._waiting: set[str] = set()
        self._running: set[str] = set()
        self._ended: set[str] = set()  # aborted, answer not yet given
        self.paused = self.asleep = False

    @property
    def running(self) -> int:
        """Requests in the engine."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests at the gate."""
        return len(self._waiting)

    @property
    def at_rest(self) -> bool:
        """Closed, and nothing runs."""
        return (self.paused or self.asleep) and not self._running

    async def enter(self, request_id: str) -> bool:
        """Wait for the gate; False when the request was aborted meanwhile. After True `leave` must follow."""
        self._waiting.add(request_id)
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: request_id in self._ended or not (self.paused or self.asleep))
            if request_id in self._ended:
                return False
            self._running.add(request_id)
            return True
        finally:
            self._waiting.discard(request_id)
            self._ended.discard(request_id)

    async def leave(self, request_id: str) -> None:
        """The request has its answer, or gave up."""
        self._running.discard(request_id)
        await self._notify()

    async def abort(self, request_id: str) -> bool:
        """End one request; False when it is not here."""
        if request_id in self._running:
            await self._abort_in_engine([request_id])
            return True
        if request_id in self._waiting:
            self._ended.add(request_id)
            await self._notify()
            return True
        return False

    async def pause(self) -> list[str]:
        """Close the gate and end all requests, running and waiting. Returns their ids once nothing runs."""
        self.paused = True
        ids = [*self._running, *self._waiting]
        self._ended |= self._waiting
        await self._notify()
        await self._end_running("a pause", _ABORT_TIMEOUT_S)
        return ids

    async def sleep(self, drain_timeout_s: float) -> list[str]:
        """Close the gate and let what runs end; what has not after the timeout is aborted, and its ids returned."""
        self.asleep = True
        try:
            async with asyncio.timeout(drain_timeout_s):
                await self._quiet()
            return []
        except TimeoutError:
            late = list(self._running)
            await self._end_running("sleep", _ABORT_TIMEOUT_S)
            return late

    async def open(self, *, paused: bool | None = None, asleep: bool | None = None) -> None:
        """Take back a pause or a sleep."""
        self.paused = self.paused if paused is None else paused
        self.asleep = self.asleep if asleep is None else asleep
        await self._notify()

    async def _end_running(self, what: str, timeout_s: float) -> None:
        """Abort until nothing runs: a request on its way into the engine is not known there at first."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._running:
                    await self._abort_in_engine(list(self._running))
                    try:
                        async with asyncio.timeout(_ABORT_POLL_S):
                            await self._quiet()
                    except TimeoutError:
                        continue
        except TimeoutError:
            raise DeadlineError(
                f"{len(self._running)} requests did not end for {what} within {timeout_s:.0f} s; the engine may hang."
            ) from None

    async def _quiet(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._running)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def names(ids: Collection[str]) -> str:
    """Some ids for a message."""
    shown = ", ".join(sorted(ids)[:5])
    return shown + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
