"""The controller: one event loop that owns the `Table`, answers clients and wakes whoever waits for a change.

Invariants
    - Between two awaits a method sees and leaves a consistent table; all methods run on one loop, so no lock is needed.
    - A waiter sleeps on a future that the next change completes. It holds no thread, so writers are never held up.
    - Every wait ends at its own deadline.

```
client --put--> Table.put ----> _changed ----> wakes watch / wait
client --clear-> Table.clear --> _changed, _room_made ----> wakes puts that wait for capacity
```
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.transfer_queue.predicate import Predicate
from rlflow.transfer_queue.storage import StorageHost, storage_backend
from rlflow.transfer_queue.table import BlockHead, Location, PutReply, Table, Tag, some

logger = logging.getLogger(__name__)

CONTROLLER_NAME = "TransferQueueController"


@dataclass(slots=True)
class WaitReply:
    """Outcome of `wait`: the matching keys with their tags; `lacking` describes what was missing at the deadline."""

    version: int
    matching: dict[str, Tag]
    lacking: str | None = None


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


class TransferQueueController:
    """Metadata of the whole table; see the module's docstring.

    Args:
        config: the merged `transfer_queue` config as a plain dict.
        placements: node id of each storage unit, None for anywhere.
    """

    def __init__(self, config: dict[str, Any], placements: Sequence[str | None]) -> None:
        backend = config["backend"]["storage_backend"]
        self._config = config
        self._table = Table(config["backend"]["SimpleStorage"]["total_storage_size"])
        self._capacity_wait_s = float(config["capacity_wait_s"])
        self._host: StorageHost = storage_backend(backend)[0](config, placements)
        self._signals: dict[str, Signal] = {}
        self._room = Signal()

    async def session(self) -> dict[str, Any]:
        """What a client needs to take part."""
        self._host.watch_units(self._on_lost, self.abandon)
        return {"config": self._config, "endpoint": self._host.endpoint}

    async def stats(self) -> dict[str, Any]:
        """Rows by partition, and blocks and bytes by storage unit."""
        rows = {name: len(tags) for name, tags in self._table.listing().items()}
        return {"rows": rows, "units": await self._host.stats()}

    def _on_lost(self, unit: int, reason: str) -> None:
        logger.warning("storage unit %d is gone: %s", unit, reason)

    async def unit_lost(self, unit: int, reason: str) -> None:
        """A client found a storage unit gone."""
        self._on_lost(unit, reason)

    async def abandon(self, writer: str) -> list[str]:
        """A writer is gone: the ids of its blocks that hold live cells."""
        return self._table.blocks_of(writer)

    # -- writing -----------------------------------------------------------------------------------

    async def put(
        self, keys: Sequence[str], partition_id: str, tags: Sequence[Tag] | None, head: BlockHead | None
    ) -> PutReply:
        """Commit a put; waits for room while the table is full.

        Raises:
            DtypeConflictError: at once.
            CapacityError: no room was made within `capacity_wait_s`, or the rows exceed the whole capacity.
        """
        deadline = asyncio.get_running_loop().time() + self._capacity_wait_s
        try:
            if head is not None:
                self._table.check_dtypes(partition_id, head)
            await self._wait_for_room(keys, partition_id, deadline)
            version = self._table.version(partition_id)
            reply = self._table.put(keys, partition_id, tags, head)
        except BaseException:
            # The block is in storage but will never be committed.
            if head is not None:
                self._host.free({head.unit: [head.block_id]})
            raise
        if self._table.version(partition_id) != version:
            self._changed(partition_id)
        self._free_garbage()
        return reply

    async def _wait_for_room(self, keys: Sequence[str], partition_id: str, deadline: float) -> None:
        count = self._table.rows_to_add(keys, partition_id)
        if self._table.has_room(count):
            return
        logger.warning("partition %s: %d new rows wait for room, the table is full", partition_id, count)
        # Rows that exceed the whole capacity can never fit, so there is nothing to wait for.
        while count <= (self._table.capacity or 0) and await self._room.wait(deadline):
            count = self._table.rows_to_add(keys, partition_id)
            if self._table.has_room(count):
                return
        self._table.check_room(count, partition_id)

    async def clear(self, keys: Sequence[str], partition_id: str) -> int:
        """Delete rows; returns how many there were."""
        count = self._table.clear(keys, partition_id)
        if count:
            self._changed(partition_id)
            self._room.fire()
        self._free_garbage()
        return count

    def _free_garbage(self) -> None:
        garbage = self._table.take_garbage()
        if garbage:
            self._host.free(garbage)

    # -- reading -----------------------------------------------------------------------------------

    async def locate(
        self,
        keys: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None,
        strict: bool,
        missing_ok: Sequence[str],
    ) -> Location:
        """See `Table.locate`."""
        return self._table.locate(keys, partition_id, select_fields, strict, missing_ok)

    async def listing(self, partition_id: str | None) -> dict[str, dict[str, Tag]]:
        """See `Table.listing`."""
        return self._table.listing(partition_id)

    # -- waiting -----------------------------------------------------------------------------------

    def _changed(self, partition_id: str) -> None:
        signal = self._signals.get(partition_id)
        if signal is not None:
            signal.fire()

    async def watch(self, partition_id: str, since_version: int, timeout_s: float) -> tuple[int, dict[str, Tag | None]]:
        """Changes after `since_version`; sleeps until there are any, at most `timeout_s` seconds."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        signal = self._signals.setdefault(partition_id, Signal())
        while True:
            version, changes = self._table.changes(partition_id, since_version)
            if changes or not await signal.wait(deadline):
                return version, changes

    async def wait(
        self,
        partition_id: str,
        keys: Sequence[str] | None,
        predicate: Predicate,
        since_version: int,
        timeout_s: float,
    ) -> WaitReply:
        """Sleep until enough keys match; looks only at what has changed since it looked last."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        wanted = None if keys is None else set(keys)
        count = predicate.count if predicate.count is not None else len(wanted or ())
        seen: dict[str, Tag] = {}
        matching: dict[str, Tag] = {}
        signal = self._signals.setdefault(partition_id, Signal())
        while True:
            version, changes = self._table.changes(partition_id, since_version)
            for key, tag in changes.items():
                if wanted is not None and key not in wanted:
                    continue
                seen.pop(key, None)
                matching.pop(key, None)
                if tag is not None:
                    seen[key] = tag
                    if predicate.accepts(tag):
                        matching[key] = tag
            since_version = version
            if len(matching) >= count:
                return WaitReply(version, matching)
            if not await signal.wait(deadline):
                return WaitReply(version, matching, _describe_lacking(wanted, seen, matching, predicate, count))

    # -- the columnar view and the marks of consumers ----------------------------------------------

    async def describe(self, keys: Sequence[str], partition_id: str, create: bool) -> dict[str, Any]:
        """See `Table.describe`; `create` makes missing rows first."""
        if create:
            await self.put(keys, partition_id, None, None)
        return self._table.describe(keys, partition_id)

    async def keys_of(self, indexes: Sequence[int]) -> list[tuple[str, str]]:
        """See `Table.keys_of`."""
        return self._table.keys_of(indexes)

    async def partitions(self) -> list[str]:
        """See `Table.partitions`."""
        return self._table.partitions()

    async def production(self, fields: Sequence[str], partition_id: str) -> tuple[list[int], list[int]]:
        """See `Table.production`."""
        return self._table.production(fields, partition_id)

    async def consumption(self, task: str, partition_id: str) -> tuple[list[int], list[int]]:
        """See `Table.consumption`."""
        return self._table.consumption(task, partition_id)

    async def consume(self, task: str, keys: Sequence[str], partition_id: str) -> None:
        """See `Table.consume`."""
        self._table.consume(task, keys, partition_id)

    async def reset_consumption(self, partition_id: str, task: str | None) -> bool:
        """See `Table.reset_consumption`."""
        return self._table.reset_consumption(partition_id, task)


def _describe_lacking(
    wanted: set[str] | None, seen: dict[str, Tag], matching: dict[str, Tag], predicate: Predicate, count: int
) -> str:
    others = {key: tag for key, tag in seen.items() if key not in matching}
    states = [f"{key}: {tag.get(predicate.tag)!r}" for key, tag in others.items()]
    if wanted is not None:
        states += [f"{key}: not there" for key in sorted(wanted - seen.keys())]
    text = f"{len(matching)} of {count} keys have {predicate.describe()}"
    return f"{text}; the others: {some(states)}" if states else f"{text}; no other keys are there"
