"""The controller: one event loop that owns the `Table`, answers clients and wakes whoever waits for a change.

Invariants
    - Between two awaits a method sees and leaves a consistent table; all methods run on one loop, so no lock is needed.
    - A waiter sleeps on a future that the change it waits for completes. It holds no thread, so writers are never held
      up, and changes that do not concern it do not wake it.
    - Every wait ends at its own deadline.
    - A block is freed only when neither the table nor a checkpoint in the making needs it.

```
client --put--> Table.put ----> _changed ----> wakes watch / wait
client --clear-> Table.clear --> _changed, RoomQueue.advance ----> commits puts that wait for capacity
```
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.transfer_queue import checkpoint
from rlflow.transfer_queue.capacity import Bounds, RoomQueue
from rlflow.transfer_queue.controller_rows import RowCalls
from rlflow.transfer_queue.errors import QueueUnavailableError, TableCheckpointError
from rlflow.transfer_queue.fetch import Fetches
from rlflow.transfer_queue.lane_server import LaneServer
from rlflow.transfer_queue.matches import Matches
from rlflow.transfer_queue.predicate import Predicate
from rlflow.transfer_queue.rows import tagged, writer_of
from rlflow.transfer_queue.samplers import make_sampler
from rlflow.transfer_queue.settings import shown_config
from rlflow.transfer_queue.signals import Signal
from rlflow.transfer_queue.snapshot import freeze, thaw
from rlflow.transfer_queue.storage import StorageHost, storage_backend
from rlflow.transfer_queue.table import BlockHead, Location, PutReply, Table
from rlflow.transfer_queue.tags import TaggedKeys, unpack_batch
from rlflow.transfer_queue.wire import pack_location, pack_put_reply, unpack_locate, unpack_put

logger = logging.getLogger(__name__)

CONTROLLER_NAME = "TransferQueueController"

# Predicates whose matching keys are remembered between two waits, so that the second need not look at all keys again.
_REMEMBERED_PREDICATES = 16
# Changes that a restored table may count before its versions reach those of a table restored a second later.
_EPOCH_BITS = 20


@dataclass(slots=True)
class WaitReply:
    """Outcome of `wait`: the matching keys with their tags; `lacking` describes what was missing at the deadline."""

    version: int
    matching: TaggedKeys
    lacking: str | None = None


@dataclass(slots=True)
class WatchReply:
    """Outcome of `watch`: the keys that were made or got a tag, and the deleted ones."""

    version: int
    changed: TaggedKeys
    deleted: list[str]


class TransferQueueController(RowCalls):
    """Metadata of the whole table; see the module's docstring.

    Args:
        config: the merged `transfer_queue` config as a plain dict.
        placements: node id of each storage unit, None for anywhere.
    """

    def __init__(self, config: dict[str, Any], placements: Sequence[str | None]) -> None:
        backend = config["backend"]["storage_backend"]
        simple = config["backend"]["SimpleStorage"]
        self._config = shown_config(config)
        self._table = Table(Bounds(simple["total_storage_size"], simple["total_storage_bytes"]))
        self._capacity_wait_s = float(config["capacity_wait_s"])
        self._host: StorageHost = storage_backend(backend)[0](config, placements)
        self._signals: dict[str, Signal] = {}
        self._room: RoomQueue[PutReply] = RoomQueue()
        self._matches: OrderedDict[tuple[str, str, str], Matches] = OrderedDict()
        self._fetches = Fetches(self._table, make_sampler(config["controller"]["sampler"]))
        self._polling = bool(config["controller"]["polling_mode"])
        self._data_signals: dict[str, Signal] = {}
        self._checkpointing = asyncio.Lock()
        self._held_back: dict[int, list[str]] | None = None  # blocks to free once a checkpoint has them
        self._lane = None if backend == "Local" else LaneServer(self)
        if backend != "Local":
            # A table of a million rows is millions of objects without a cycle; looking through them takes the garbage
            # collector a second, in which nobody would be answered.
            gc.set_threshold(100_000, 50, 100)

    async def session(self) -> dict[str, Any]:
        """What a client needs to take part."""
        self._host.watch_units(self._lose_unit, self.abandon)
        lane = None if self._lane is None else await self._lane.open()
        return {"config": self._config, "endpoint": self._host.endpoint, "lane": lane}

    async def stats(self) -> dict[str, Any]:
        """Rows by partition, and blocks and bytes by storage unit."""
        rows = {name: len(self._table.partition(name).rows) for name in self._table.partitions()}
        units: list[dict[str, int]] = [{"blocks": 0, "bytes": 0, **memory} for memory in await self._host.stats()]
        for block in self._table.blocks():
            units[block.unit]["blocks"] += 1
            units[block.unit]["bytes"] += block.nbytes
        return {"rows": rows, "units": units}

    # -- writing -----------------------------------------------------------------------------------

    async def put(
        self,
        keys: Sequence[str],
        partition_id: str,
        tags: bytes | None,
        head: BlockHead | None,
        expect: bytes | None = None,
    ) -> PutReply:
        """Commit a put; waits for room while the table is full.

        Args:
            keys: the rows.
            partition_id: their partition.
            tags: `tags.pack_tags` of one tag a row.
            head: the block with their fields.
            expect: tag entries of each row that must hold, packed in the same way.

        Raises:
            DtypeConflictError, StorageUnitLostError, TagConflictError: at once.
            CapacityError: no room was made within `capacity_wait_s`, or the rows exceed the whole capacity.
            QueueUnavailableError: no storage unit is left.
        """
        batch = None if tags is None else unpack_batch(tags)
        expected = None if expect is None else unpack_batch(expect).dicts()

        def fits() -> bool:
            return self._table.has_room(keys, partition_id, head)

        committed = False

        def commit() -> PutReply:
            nonlocal committed
            version = self._table.version(partition_id)
            reply = self._table.put(keys, partition_id, batch, head, expected)
            committed = True
            if self._table.version(partition_id) != version:
                self._changed(partition_id)
            self._data_came(partition_id, keys, head)
            self._free_garbage()
            return reply

        try:
            if head is not None:
                self._check_units()
                self._table.check_head(partition_id, head)
            # New rows go behind those that wait already.
            if fits() and (not self._room or not self._takes_room(keys, partition_id, head)):
                reply = commit()
                # Rows that wait for room may be old ones by now, and overwriting may have made some.
                self._room.advance()
                return reply
            return await self._commit_later(keys, partition_id, head, fits, commit)
        except BaseException:
            # The block is in storage but will never be committed.
            if head is not None and not committed:
                self._free({head.unit: [head.block_id]})
            raise

    async def put_packed(self, message: bytes) -> bytes:
        """`put`, see `wire`."""
        return pack_put_reply(await self.put(*unpack_put(message)))

    def _takes_room(self, keys: Sequence[str], partition_id: str, head: BlockHead | None) -> bool:
        return head is not None and self._table.rows_to_add(keys, partition_id) > 0

    async def _commit_later(
        self, keys: Sequence[str], partition_id: str, head: BlockHead | None, fits: Any, commit: Any
    ) -> PutReply:
        count = self._table.rows_to_add(keys, partition_id)
        size = 0 if head is None else head.nbytes
        # What exceeds the whole capacity can never fit, so there is nothing to wait for.
        if self._table.bounds.fit(count, size):
            logger.warning("partition %s: %d new rows wait for room, the table is full", partition_id, count)
            deadline = asyncio.get_running_loop().time() + self._capacity_wait_s
            try:
                return await self._room.commit(fits, commit, deadline)
            except TimeoutError:
                pass
        self._table.check_room(keys, partition_id, head)
        return commit()

    async def clear(self, keys: Sequence[str], partition_id: str) -> int:
        """Delete rows; returns how many there were."""
        count = self._table.clear(keys, partition_id)
        self._removed(partition_id, count)
        return count

    def _removed(self, partition_id: str, count: int) -> None:
        if count:
            self._changed(partition_id)
        self._free_garbage()
        self._room.advance()

    def _check_units(self) -> None:
        lost, units = self._table.lost_units, len(self._host.placement())
        if len(lost) >= units:
            raise QueueUnavailableError(
                f"all {units} storage units of the table are gone ({'; '.join(lost.values())}), so it can store "
                "no fields any more; end the run and start it again"
            )

    # -- storage -----------------------------------------------------------------------------------

    def _free_garbage(self) -> None:
        garbage = self._table.take_garbage()
        if garbage:
            self._free(garbage)

    def _free(self, garbage: dict[int, list[str]]) -> None:
        if self._held_back is not None:
            for unit, block_ids in garbage.items():
                self._held_back.setdefault(unit, []).extend(block_ids)
            return
        living = {unit: ids for unit, ids in garbage.items() if unit not in self._table.lost_units}
        if living:
            self._host.free(living)

    async def unit_lost(self, unit: int, reason: str) -> Any:
        """A storage unit is gone; tells it for the first time or again. Returns the `endpoint` of those there are."""
        self._lose_unit(unit, reason)
        return self._host.endpoint

    def _lose_unit(self, unit: int, reason: str) -> None:
        if unit in self._table.lost_units:
            return
        logger.error("storage unit %d is gone: %s", unit, reason)
        self._host.replace(unit)
        for partition_id in self._table.lose_unit(unit, reason):
            self._changed(partition_id)
        self._fetches.forget()
        self._room.advance()

    async def abandon(self, writer: str) -> list[str]:
        """A writer is dead: refuse what it may still commit. Returns the ids of its blocks that are needed."""
        held_back = [block_id for block_ids in (self._held_back or {}).values() for block_id in block_ids]
        return self._table.abandon(writer) + [block_id for block_id in held_back if writer_of(block_id) == writer]

    # -- checkpoints -------------------------------------------------------------------------------

    async def save_checkpoint(self, folder: str, user_metadata: Any) -> None:
        """Write the table of this moment; see `checkpoint`."""
        async with self._checkpointing:
            sampler = self._fetches.sampler.save_checkpoint()
            snapshot = freeze(self._table)
            self._held_back = {}
            try:
                await checkpoint.save(snapshot, self._host, Path(folder), sampler, user_metadata)
            finally:
                garbage, self._held_back = self._held_back, None
                self._free(garbage)

    async def load_checkpoint(self, folder: str) -> Any:
        """Replace the table by the one in a checkpoint; returns what the caller of `save_checkpoint` added to it.

        Everyone who waits is woken; a watcher of the former table gets a `WatchGapError`.
        """
        async with self._checkpointing:
            loaded = await checkpoint.load(self._host, Path(folder))
            try:
                # Above every version that anybody may have seen, also in a table of an earlier run.
                seen = max(loaded.state["version"], self._table.highest_version())
                start = max(int(time.time()), (seen >> _EPOCH_BITS) + 1) << _EPOCH_BITS
                table = await asyncio.to_thread(thaw, loaded.state, loaded.homes, self._table.bounds, start)
                if loaded.sampler is not None:
                    self._fetches.sampler.load_checkpoint(loaded.sampler)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                checkpoint.discard(self._host, loaded.homes)
                raise TableCheckpointError(f"the state in {folder} contradicts itself ({error!r})") from error
            self._replace_table(table)
            return loaded.user_metadata

    def _replace_table(self, table: Table) -> None:
        former, self._table = self._table, table
        table.take_over(former)
        self._fetches = Fetches(table, self._fetches.sampler)
        for partition_id in list(self._data_signals):
            self._wake_fetches(partition_id)
        garbage: dict[int, list[str]] = {}
        for block in former.blocks():
            garbage.setdefault(block.unit, []).append(block.block_id)
        self._free(garbage)
        self._free_garbage()
        for partition_id in list(self._signals):
            self._changed(partition_id)
        self._room.advance()

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

    async def locate_packed(self, message: bytes) -> bytes:
        """`locate`, see `wire`."""
        return pack_location(await self.locate(*unpack_locate(message)))

    async def listing(self, partition_id: str | None) -> dict[str, TaggedKeys]:
        """The keys of one partition or of all, in creation order; {} for an unknown partition."""
        known = self._table.partitions()
        wanted = known if partition_id is None else [partition_id] if partition_id in known else []
        return {name: tagged(self._table.partition(name).rows.values()) for name in wanted}

    async def lineage(
        self, keys: Sequence[str], partition_id: str, fields: Sequence[str] | None
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """See `Table.lineage`."""
        return self._table.lineage(keys, partition_id, fields)

    # -- waiting -----------------------------------------------------------------------------------

    def _changed(self, partition_id: str) -> None:
        signal = self._signals.get(partition_id)
        if signal is None:
            return
        signal.fire()
        if not signal:
            del self._signals[partition_id]

    def _signal(self, partition_id: str) -> Signal:
        return self._signals.setdefault(partition_id, Signal())

    async def watch(self, partition_id: str, since_version: int, timeout_s: float) -> WatchReply:
        """Changes after `since_version`; sleeps until there are any, at most `timeout_s` seconds."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            version, rows = self._table.changed_rows(partition_id, since_version)
            latest = {row.key: row for row in rows}
            if latest or not await self._signal(partition_id).wait(deadline):
                changed = tagged(row for row in latest.values() if row.alive)
                return WatchReply(version, changed, [key for key, row in latest.items() if not row.alive])

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
        count = predicate.count if predicate.count is not None else len(set(keys or ()))
        if keys is None and since_version == 0:
            matches = self._shared_matches(partition_id, predicate)
        else:
            matches = Matches(lambda: self._table, partition_id, predicate, keys, since_version)

        def ready() -> bool:
            matches.refresh()
            return len(matches) >= count

        while not ready():
            if not await self._signal(partition_id).wait(deadline, ready):
                return WaitReply(matches.version, matches.tagged(), matches.describe_lacking(count))
        return WaitReply(matches.version, matches.tagged())

    def _shared_matches(self, partition_id: str, predicate: Predicate) -> Matches:
        key = (partition_id, predicate.tag, repr(predicate.wanted()))
        if key not in self._matches:
            self._matches[key] = Matches(lambda: self._table, partition_id, predicate)
        self._matches.move_to_end(key)
        while len(self._matches) > _REMEMBERED_PREDICATES:
            self._matches.popitem(last=False)
        return self._matches[key]
