"""Waking coroutines that wait for a change, without polling and without holding a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """Wakes those who wait on it; knows nothing of what happened."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], Callable[[], bool] | None] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def fire(self) -> None:
        """Something has changed: wake the waiters that are ready now."""
        for waiter, ready in list(self._waiters.items()):
            if waiter.done():
                continue
            try:
                if ready is None or ready():
                    waiter.set_result(None)
            except Exception as error:  # noqa: BLE001 - belongs to the waiter, not to the one who changed something
                waiter.set_exception(error)

    async def wait(self, deadline: float, ready: Callable[[], bool] | None = None) -> bool:
        """Sleep until a `fire` after which `ready()` is true; False when the loop's clock reaches `deadline` first.

        Args:
            deadline: time of the loop's clock.
            ready: looked at in each `fire`, so that a waiter costs no more than this look while nothing concerns it.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = ready
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except TimeoutError:
            return False
        finally:
            del self._waiters[waiter]
        return True
