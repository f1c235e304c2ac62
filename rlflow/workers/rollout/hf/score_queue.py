"""Conversations that wait for a score, and the batches they are computed in.

Invariants
    - One forward at a time, in a thread of its own; the event loop keeps answering.
    - A batch has rows of similar length, within both limits; nothing waits for a batch to fill up.
    - While the queue is closed requests wait; whoever closes it waits for the running batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

Rows = Sequence[Sequence[int]]


@dataclass
class _Request:
    ids: list[int]
    score: asyncio.Future[float] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ScoreQueue:
    """Batches requests for a scoring function.

    Args:
        score: token rows -> one score a row; called in the queue's thread.
        max_rows: rows of one batch at most.
        max_tokens: tokens of one batch at most, padding included; a single longer row is a batch of its own.
    """

    def __init__(self, score: Callable[[Rows], list[float]], max_rows: int, max_tokens: int) -> None:
        self._score, self._max_rows, self._max_tokens = score, max_rows, max_tokens
        self._waiting: list[_Request] = []
        self._arrived, self._open, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scores")
        self._worker: asyncio.Task[None] | None = None
        self.scored = 0

    async def submit(self, ids: list[int], timeout_s: float) -> float:
        """The score of one row; `TimeoutError` after `timeout_s`, and then it is not computed any more."""
        if self._worker is None:
            self._worker = asyncio.create_task(self._run())
        request = _Request(ids)
        self._waiting.append(request)
        self._arrived.set()
        async with asyncio.timeout(timeout_s):
            return await request.score

    async def close(self) -> None:
        """Compute nothing more until `open`; returns when the running batch is done."""
        self._open.clear()
        await self._idle.wait()

    def open(self) -> None:
        """Compute what waits."""
        self._open.set()

    async def in_thread(self, work: Callable[[], None]) -> None:
        """Run something where the model is used, between two batches."""
        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def status(self) -> dict[str, int | bool]:
        """Counts for health checks."""
        running, asleep = not self._idle.is_set(), not self._open.is_set()
        return {"waiting": len(self._waiting), "running": int(running), "asleep": asleep, "scored": self.scored}

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            while not self._open.is_set():  # it may be closed again before this task gets its turn
                await self._open.wait()
            batch = self._next_batch()
            if not batch:
                continue
            self._idle.clear()
            try:
                scores = await loop.run_in_executor(self._thread, self._score, [request.ids for request in batch])
            except Exception as error:  # noqa: BLE001 -- out of memory, a bad kernel: the callers get it, the queue goes on
                for request in batch:
                    if not request.score.done():
                        request.score.set_exception(error)
            else:
                self.scored += len(batch)
                for request, score in zip(batch, scores, strict=True):
                    if not request.score.done():
                        request.score.set_result(score)
            finally:
                self._idle.set()

    def _next_batch(self) -> list[_Request]:
        """The oldest request, with those that waste least padding beside it."""
        self._waiting = [request for request in self._waiting if not request.score.done()]
        if not self._waiting:
            self._arrived.clear()
            return []
        oldest, *rest = self._waiting
        batch, longest = [oldest], len(oldest.ids)
        for request in sorted(rest, key=lambda other: abs(len(other.ids) - len(oldest.ids))):
            width = max(longest, len(request.ids))
            if len(batch) == self._max_rows or width * (len(batch) + 1) > self._max_tokens:
                break
            batch.append(request)
            longest = width
        taken = {id(request) for request in batch}
        self._waiting = [request for request in self._waiting if id(request) not in taken]
        return batch
