"""How much a table may hold, and the queue of the puts that wait for room.

Only puts of new rows with fields wait: fields of existing rows, tags and markers go through at any time, so that the
ones who make room are never stopped by it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlflow.transfer_queue.errors import CapacityError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a table may hold at a time; None for no limit.

    Attributes:
        rows: rows of all partitions, also those that only have a tag.
        nbytes: bytes of all blocks. A block counts until the last of its rows is cleared.
    """

    rows: int | None = None
    nbytes: int | None = None

    def fit(self, rows: int, nbytes: int) -> bool:
        """Whether so much may be held."""
        return (self.rows is None or rows <= self.rows) and (self.nbytes is None or nbytes <= self.nbytes)

    def error(self, rows: int, nbytes: int, partition_id: str, held: Mapping[str, tuple[int, int]]) -> CapacityError:
        """The error of a put that found no room.

        Args:
            rows: new rows of the put.
            nbytes: bytes of the put.
            partition_id: its partition.
            held: rows and bytes of each partition.
        """
        total_rows = sum(count for count, _ in held.values())
        total_bytes = sum(count for _, count in held.values())
        limits = []
        if self.rows is not None:
            limits.append(f"{total_rows} of at most {self.rows} rows (total_storage_size)")
        if self.nbytes is not None:
            limits.append(f"{total_bytes:,} of at most {self.nbytes:,} bytes (total_storage_bytes)")
        largest = sorted(held.items(), key=lambda item: item[1], reverse=True)[:4]
        parts = ", ".join(f"{name!r}: {rows_held} rows, {size:,} bytes" for name, (rows_held, size) in largest)
        return CapacityError(
            f"{rows} new rows for partition {partition_id!r} ({nbytes:,} bytes) do not fit: the table holds "
            f"{' and '.join(limits)}. Held by {parts or 'nobody'}. Clear rows that are no longer needed (kv_clear), or "
            "raise the limit under transfer_queue.backend.SimpleStorage"
        )


@dataclass(slots=True, eq=False)
class _Waiting(Generic[T]):
    fits: Callable[[], bool]
    commit: Callable[[], T]
    done: asyncio.Future[T]


class RoomQueue(Generic[T]):
    """Puts that wait for room, first come first served.

    A put is committed in the moment in which it is its turn and fits, so that no later one can take its room; a later
    one that would fit waits all the same, or a large put might wait for ever.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Waiting[T]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    async def commit(self, fits: Callable[[], bool], commit: Callable[[], T], deadline: float) -> T:
        """Call `commit` once it is this put's turn and `fits()`, and return what it returns.

        Raises:
            TimeoutError: the loop's clock has reached `deadline` first.
        """
        entry = _Waiting(fits, commit, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            async with asyncio.timeout_at(deadline):
                return await entry.done
        except TimeoutError:
            if not entry.done.cancelled():  # committed in the very moment the time was over
                return entry.done.result()
            raise
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self.advance()  # whoever stood behind it may fit

    def advance(self) -> None:
        """There may be more room than before: commit whoever fits, in order."""
        while self._waiting and self._waiting[0].fits():
            entry = self._waiting.popleft()
            if entry.done.done():
                continue
            try:
                entry.done.set_result(entry.commit())
            except Exception as error:  # noqa: BLE001 - belongs to the waiting put, not to the one who made room
                entry.done.set_exception(error)
