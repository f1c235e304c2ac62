"""A few scorer processes and the calls that wait for them.

Invariants
    - The deadline of a call runs while the scorer runs, not while it waits for a free process.
    - A killed process is replaced when the next call needs one; calls that shared it with the
      culprit run again, each alone.
    - Process 0 is used first: a second one starts only when the first is busy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rlflow.reward_loop.process import LOAD_TIMEOUT_S, ScorerLostError, ScorerProcess
from rlflow.reward_loop.result import InvalidRewardError
from rlflow.reward_loop.scorer import ScorerSpec
from rlflow.utils.errors import ConfigError

ASYNC_CALLS_PER_PROCESS = 64


class QueueClock:
    """Seconds that one reward call spent waiting for a process, so that they do not count against its deadline."""

    def __init__(self) -> None:
        self._total = 0.0
        self._since = 0.0
        self._waits = 0

    def seconds(self) -> float:
        """Seconds waited so far, a wait in progress included."""
        return self._total + (time.monotonic() - self._since if self._waits else 0.0)

    def forgive(self, seconds: float) -> None:
        """Count time that was lost through no fault of the call."""
        self._total += seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside; waits that overlap count once."""
        if not self._waits:
            self._since = time.monotonic()
        self._waits += 1
        try:
            yield
        finally:
            total = self.seconds()
            self._waits -= 1
            if not self._waits:
                self._total = total


queue_clock: ContextVar[QueueClock | None] = ContextVar("queue_clock", default=None)


class ScorerPool:
    """Runs a reward function in up to `size` killable processes.

    Args:
        spec: the function.
        timeout_s: seconds one call may take.
        size: processes; a call that hangs holds one of them until its deadline.
        load_timeout_s: seconds a process may take to import the function's module.
    """

    def __init__(
        self, spec: ScorerSpec, timeout_s: float, size: int = 2, load_timeout_s: float = LOAD_TIMEOUT_S
    ) -> None:
        self.spec = spec
        self.timeout_s = timeout_s
        self.load_timeout_s = load_timeout_s
        self._size = size
        self._processes: list[ScorerProcess | None] = [None] * size
        self._locks = [asyncio.Lock() for _ in range(size)]
        self._slots: asyncio.PriorityQueue[int] | None = None
        self._per_process = 1
        self._start_lock = asyncio.Lock()
        self._alone = asyncio.Semaphore(size)
        self._living: set[ScorerProcess] = set()
        self._closed = False

    async def start(self) -> None:
        """Start the first process. Raises `ConfigError` when the function cannot be loaded."""
        async with self._start_lock:
            if self._slots is not None:
                return
            first = await self._process(0)
            self._per_process = ASYNC_CALLS_PER_PROCESS if first.concurrent else 1
            slots: asyncio.PriorityQueue[int] = asyncio.PriorityQueue()
            for slot in range(self._size * self._per_process):
                slots.put_nowait(slot)
            self._slots = slots

    async def call(self, **keywords: Any) -> float | dict[str, Any]:
        """What the function returned for these keywords, as a float or a plain dict.

        Raises:
            InvalidRewardError: no usable score; the text says why.
        """
        clock = queue_clock.get() or QueueClock()
        with clock.waiting():
            await self.start()
            assert self._slots is not None
            slot = await self._slots.get()
        started = time.monotonic()
        try:
            with clock.waiting():
                process = await self._process(slot // self._per_process)
            started = time.monotonic()
            return await process.call(keywords, self.timeout_s)
        except ScorerLostError:
            clock.forgive(time.monotonic() - started)
        except ConfigError as error:
            raise InvalidRewardError(f"the scorer process does not start any more: {error}") from error
        finally:
            self._slots.put_nowait(slot)
        return await self._call_alone(keywords, clock)

    async def _call_alone(self, keywords: dict[str, Any], clock: QueueClock) -> float | dict[str, Any]:
        """Run one call in a process of its own, so that its fate is its own too."""
        with clock.waiting():
            await self._alone.acquire()
        process: ScorerProcess | None = None
        try:
            with clock.waiting():
                process = await self._spawn()
            return await process.call(keywords, self.timeout_s)
        except (ScorerLostError, ConfigError) as error:
            raise InvalidRewardError(str(error)) from error
        finally:
            self._alone.release()
            if process is not None:
                await process.kill("its only call is over")
                self._living.discard(process)

    def pids(self) -> list[int]:
        """Process ids of the living scorer processes."""
        return [process.pid for process in self._living if process.alive]

    async def close(self) -> None:
        """Kill all processes; later calls are invalid."""
        self._closed = True
        for process in list(self._living):
            await process.kill("the pool was closed")
        self._living.clear()

    async def _process(self, index: int) -> ScorerProcess:
        async with self._locks[index]:
            process = self._processes[index]
            if process is None or not process.alive:
                if process is not None:
                    self._living.discard(process)
                process = self._processes[index] = await self._spawn()
            return process

    async def _spawn(self) -> ScorerProcess:
        if self._closed:
            raise InvalidRewardError("the reward worker is shutting down")
        process = await ScorerProcess.spawn(self.spec, self.load_timeout_s)
        self._living.add(process)
        return process
