"""The controller's calls for the low-level client: rows by number, statuses, and fetches that wait.

A fetch that finds too few rows sleeps on a signal of its partition's data; the put that brings the missing rows wakes
it. It holds no thread, so producers are served meanwhile.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlflow.transfer_queue.errors import FetchTimeoutError, QueueRequestError, StorageKeyNotFoundError, some
from rlflow.transfer_queue.fetch import Fetches
from rlflow.transfer_queue.signals import Signal
from rlflow.transfer_queue.table import BlockHead, PutReply, Table, Tag


class RowCalls(ABC):
    """Mixin of `TransferQueueController`."""

    _table: Table
    _fetches: Fetches
    _polling: bool
    _data_signals: dict[str, Signal]

    @abstractmethod
    async def put(
        self,
        keys: Sequence[str],
        partition_id: str,
        tags: bytes | None,
        head: BlockHead | None,
        expect: bytes | None = None,
    ) -> PutReply:
        """See `TransferQueueController.put`."""

    @abstractmethod
    async def clear(self, keys: Sequence[str], partition_id: str) -> int:
        """See `TransferQueueController.clear`."""

    @abstractmethod
    def _changed(self, partition_id: str) -> None:
        """Keys or tags of the partition have changed."""

    @abstractmethod
    def _removed(self, partition_id: str, count: int) -> None:
        """`count` rows of the partition are gone."""

    # -- fetch -------------------------------------------------------------------------------------

    def _data_came(self, partition_id: str, keys: Sequence[str], head: BlockHead | None) -> None:
        """A put was committed: who waits for its fields looks again."""
        if head is None:
            return
        self._fetches.committed(partition_id, keys, head.fields)
        self._wake_fetches(partition_id)

    def _wake_fetches(self, partition_id: str) -> None:
        signal = self._data_signals.get(partition_id)
        if signal is None:
            return
        signal.fire()
        if not signal:
            del self._data_signals[partition_id]

    async def fetch(
        self,
        fields: Sequence[str],
        batch_size: int,
        partition_id: str,
        task: str,
        config: dict[str, Any],
        timeout_s: float,
    ) -> dict[str, Any]:
        """Rows that have all `fields`, marked as consumed by `task`; see `Fetches.choose` and `RowNumbers.describe`.

        With too few rows: no rows when polling, else it sleeps until there are enough.

        Raises:
            FetchTimeoutError: still too few after `timeout_s` seconds.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            rows = self._fetches.choose(fields, batch_size, partition_id, task, config)
            if rows is not None:
                return self._table.describe(rows, fields, partition_id)
            if self._polling:
                return self._table.describe([], [], partition_id)
            signal = self._data_signals.setdefault(partition_id, Signal())
            if not await signal.wait(deadline, lambda: self._fetches.has(batch_size, fields, partition_id, task)):
                raise FetchTimeoutError(self._describe_shortage(fields, batch_size, partition_id, task, timeout_s))

    def _describe_shortage(
        self, fields: Sequence[str], batch_size: int, partition_id: str, task: str, timeout_s: float
    ) -> str:
        held = self._table.indexes(partition_id)
        ready = self._table.indexes(partition_id, None, fields)
        taken = len(set(ready) & self._table.consumed_by(task, partition_id))
        return (
            f"task {task!r} waited {timeout_s:g} s for {batch_size} rows of partition {partition_id!r} with the fields "
            f"{some(list(fields))}: {len(held)} rows are there, {len(ready)} have them, {taken} of those are consumed, "
            f"and {type(self._fetches.sampler).__name__} makes no batch of the rest. Its producers are slow or gone; "
            "allow more time (timeout_s, transfer_queue.controller.fetch_timeout_s), or set "
            "transfer_queue.controller.polling_mode=true to get an empty batch at once"
        )

    async def force_fetch(self, fields: Sequence[str], partition_id: str) -> dict[str, Any]:
        """All rows of a partition, ready or not; nothing is marked."""
        if partition_id not in self._table.partitions():
            raise QueueRequestError(f"there is no partition {partition_id!r}; there are {self._table.partitions()}")
        return self._table.describe(self._table.indexes(partition_id), fields, partition_id)

    # -- rows by number ----------------------------------------------------------------------------

    async def insert(self, keys: Sequence[str], partition_id: str) -> list[int]:
        """Make missing rows; numbers of all of them, in order."""
        await self.put(keys, partition_id, None, None)
        return self._table.indexes(partition_id, keys)

    async def indexes(self, keys: Sequence[str], partition_id: str) -> list[int]:
        """See `RowNumbers.indexes`."""
        return self._table.indexes(partition_id, keys)

    async def describe(self, keys: Sequence[str], partition_id: str, create: bool, strict: bool) -> dict[str, Any]:
        """Rows by key with the fields they share, see `RowNumbers.describe`.

        Args:
            keys: their keys.
            partition_id: their partition.
            create: make missing rows first.
            strict: an unknown key is a `StorageKeyNotFoundError`; else it is left out.
        """
        if create:
            await self.put(keys, partition_id, None, None)
        indexes = self._table.indexes(partition_id, keys)
        if strict and len(indexes) < len(keys):
            known = {key for _, key in self._table.keys_of(indexes)}
            raise StorageKeyNotFoundError(
                f"partition {partition_id!r} has no key {some([key for key in keys if key not in known])}"
            )
        return self._table.describe(indexes, None, partition_id)

    async def keys_of(self, indexes: Sequence[int], strict: bool = True) -> list[tuple[str, str] | None]:
        """(partition, key) of row numbers; None for an unknown one unless `strict`, see `RowNumbers.keys_of`."""
        known = indexes if strict else self._table.existing(indexes)
        keys = dict(zip(known, self._table.keys_of(known), strict=True))
        return [keys.get(index) for index in indexes]

    async def set_tags(self, indexes: Sequence[int], tags: Sequence[Tag]) -> None:
        """Replace the tags of rows."""
        rows: dict[str, list[tuple[str, Tag]]] = {}
        for (partition_id, key), tag in zip(self._table.keys_of(indexes), tags, strict=True):
            rows.setdefault(partition_id, []).append((key, tag))
        for partition_id, tagged in rows.items():
            self._table.set_tags([key for key, _ in tagged], partition_id, [tag for _, tag in tagged])
            self._changed(partition_id)

    async def clear_rows(self, indexes: Sequence[int]) -> int:
        """Delete rows by number; unknown ones are ignored. Returns how many there were."""
        keys: dict[str, list[str]] = {}
        for partition_id, key in self._table.keys_of(self._table.existing(indexes)):
            keys.setdefault(partition_id, []).append(key)
        return sum([await self.clear(names, partition_id) for partition_id, names in keys.items()])

    async def clear_partition(self, partition_id: str) -> int:
        """Delete a partition with all marks and remembered choices; returns how many rows it had."""
        self._fetches.drop(partition_id)
        count = self._table.drop(partition_id)
        self._removed(partition_id, count)
        return count

    # -- statuses and marks ------------------------------------------------------------------------

    async def partitions(self) -> list[str]:
        """See `RowNumbers.partitions`."""
        return self._table.partitions()

    async def production(self, fields: Sequence[str], partition_id: str) -> tuple[list[int], np.ndarray, bool]:
        """See `RowNumbers.production`."""
        return self._table.production(fields, partition_id)

    async def consumption(self, task: str, partition_id: str) -> tuple[list[int], np.ndarray, bool]:
        """See `RowNumbers.consumption`."""
        return self._table.consumption(task, partition_id)

    async def consume(self, task: str, keys: Sequence[str], partition_id: str) -> None:
        """Mark rows as consumed by `task`; `StorageKeyNotFoundError` for an unknown key."""
        reply = await self.describe(keys, partition_id, create=False, strict=True)
        self._fetches.consume(task, reply["indexes"], partition_id)

    async def reset_consumption(self, partition_id: str, task: str | None) -> bool:
        """See `RowNumbers.reset_consumption`."""
        found = self._table.reset_consumption(partition_id, task)
        self._fetches.forget(partition_id)
        self._wake_fetches(partition_id)
        return found
