"""Waking coroutines that wait for a change, without polling and without holding a thread."""

from __future__ import annotations

import asyncio


class Signal:
    """Wakes everyone who waits on it; knows nothing of what happened."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def fire(self) -> None:
        """Wake all present waiters."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self, deadline: float) -> bool:
        """Sleep until the next `fire`; False when the loop's clock reaches `deadline` first."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True
