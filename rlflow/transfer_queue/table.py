"""`Table`: keys, tags and the place of every cell. Pure bookkeeping: no Ray, no waiting, no cell contents.

Invariants
    - Each method checks first and changes afterwards: an error leaves the table as it was.
    - A tag is never changed in place but replaced, so that a reply built from it can be serialised while writers go on.
    - `garbage` holds the blocks without a live cell; whoever called a method frees them.
    - Finding what changed since a version costs as much as has changed, not as much as is held.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlflow.transfer_queue.column import FieldHead, row_shapes
from rlflow.transfer_queue.errors import (
    CapacityError,
    DtypeConflictError,
    MissingFieldError,
    NotReadyError,
    QueueArgumentError,
    StorageKeyNotFoundError,
    WatchGapError,
)

Tag = dict[str, Any]

# Deletions that a watcher may lag behind before it must start anew: over a hundred steps of a large run.
MAX_TOMBSTONES = 200_000


# Where a storage backend keeps a block. The table only hands it on; plain values, so that a checkpoint can hold it.
Extent = tuple[int, ...]


@dataclass(slots=True)
class BlockHead:
    """What a put wrote: the commit that makes it visible.

    Attributes:
        unit: the storage unit that holds the block.
        block_id: "{writer}:{number}", unique in the table.
        fields: what each column is.
        extent: where the backend keeps it; None when the id is enough to find it.
    """

    unit: int
    block_id: str
    fields: dict[str, FieldHead]
    extent: Extent | None = None


@dataclass(slots=True)
class _Block:
    head: BlockHead
    live: int  # cells of any field that are still in a row


@dataclass(slots=True)
class _Row:
    index: int
    tag: Tag = field(default_factory=dict)
    cells: dict[str, tuple[_Block, int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Field:
    dtype: str
    cells: int = 0
    declared: int | None = None
    # Smallest and largest row shape seen, by rank: tells the ragged dimension even when one batch does not show it.
    span: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def observe(self, head: FieldHead) -> None:
        if head.ragged is not None:
            self.declared = head.ragged
        shapes = head.shapes
        if not shapes.size or shapes.min() < 0:
            return
        low, high = tuple(shapes.min(axis=0).tolist()), tuple(shapes.max(axis=0).tolist())
        rank = shapes.shape[1]
        if rank in self.span:
            old_low, old_high = self.span[rank]
            low = tuple(map(min, low, old_low))
            high = tuple(map(max, high, old_high))
        self.span[rank] = (low, high)

    def ragged(self) -> int | None:
        differing = [
            axis
            for low, high in self.span.values()
            for axis, (a, b) in enumerate(zip(low, high, strict=True))
            if a != b
        ]
        return differing[0] if len(differing) == 1 else self.declared


@dataclass(slots=True)
class _Partition:
    rows: dict[str, _Row] = field(default_factory=dict)
    fields: dict[str, _Field] = field(default_factory=dict)
    consumed: dict[str, set[int]] = field(default_factory=dict)
    version: int = 0
    floor: int = 0  # changes up to this version may be forgotten
    log: OrderedDict[str, int] = field(default_factory=OrderedDict)  # key -> version of its last change, oldest first
    tombstones: deque[tuple[str, int]] = field(default_factory=deque)


@dataclass(slots=True)
class PutReply:
    """Tags and common fields of the put's rows after the commit."""

    tags: list[Tag]
    fields: list[str]


@dataclass(slots=True)
class Location:
    """Where the cells of a read are.

    Attributes:
        keys: the keys found, in the order asked for.
        unknown: keys that do not exist (never with `strict`).
        blocks: (storage unit, block id, extent).
        cells: per field, for each key its number in `blocks` and its row in the block.
        ragged: per field the ragged row dimension, where known.
    """

    keys: list[str]
    unknown: list[str]
    blocks: list[tuple[int, str, Extent | None]]
    cells: dict[str, tuple[np.ndarray, np.ndarray]]
    ragged: dict[str, int | None]


def some(names: Sequence[str], limit: int = 4) -> str:
    """The first few names of a list, for messages."""
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


class Table:
    """All partitions.

    Args:
        capacity: rows that may be held at a time over all partitions; None for no limit.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.garbage: dict[int, list[str]] = {}
        self._partitions: dict[str, _Partition] = {}
        self._row_count = 0
        self._next_index = 0
        self._by_index: dict[int, tuple[str, str]] = {}

    # -- writing -----------------------------------------------------------------------------------

    def rows_to_add(self, keys: Sequence[str], partition_id: str) -> int:
        """How many of the keys are new."""
        rows = self._rows(partition_id)
        return sum(key not in rows for key in keys)

    def has_room(self, count: int) -> bool:
        """Whether `count` more rows fit."""
        return self.capacity is None or self._row_count + count <= self.capacity

    def check_room(self, count: int, partition_id: str) -> None:
        """`CapacityError` unless `count` more rows fit."""
        if not self.has_room(count):
            raise CapacityError(
                f"{count} new rows for partition {partition_id!r} do not fit: the table holds {self._row_count} of at "
                f"most {self.capacity} rows. Clear rows that are no longer needed (kv_clear), or raise "
                "transfer_queue.backend.SimpleStorage.total_storage_size"
            )

    def check_dtypes(self, partition_id: str, head: BlockHead) -> None:
        """`DtypeConflictError` when a field of the block has another dtype in the partition."""
        known = self._partitions[partition_id].fields if partition_id in self._partitions else {}
        for name, new in head.fields.items():
            if name in known and known[name].dtype != new.dtype:
                raise DtypeConflictError(
                    f"field {name!r} of partition {partition_id!r} holds {known[name].dtype}, the put offers "
                    f"{new.dtype}. A field has one dtype: cast the values, or use another field name. Nothing of this "
                    "put was stored"
                )

    def put(
        self, keys: Sequence[str], partition_id: str, tags: Sequence[Tag] | None = None, head: BlockHead | None = None
    ) -> PutReply:
        """Commit: create missing rows, place the block's cells, merge the tags.

        Raises:
            DtypeConflictError, CapacityError: nothing has changed then.
        """
        if head is not None:
            self.check_dtypes(partition_id, head)
        self.check_room(self.rows_to_add(keys, partition_id), partition_id)
        partition = self._partitions.setdefault(partition_id, _Partition())
        rows, changed = [], []
        for i, key in enumerate(keys):
            row = partition.rows.get(key)
            if row is None or tags is not None:
                changed.append(key)
            if row is None:
                row = partition.rows[key] = _Row(self._next_index)
                self._by_index[self._next_index] = (partition_id, key)
                self._next_index += 1
                self._row_count += 1
            if tags is not None:
                row.tag = {**row.tag, **tags[i]}
            rows.append(row)
        if head is not None:
            self._place(partition, rows, head)
        self._touch(partition, changed)
        return PutReply([row.tag for row in rows], sorted(_common_fields(rows)))

    def _place(self, partition: _Partition, rows: Sequence[_Row], head: BlockHead) -> None:
        block = _Block(head, len(head.fields) * len(rows))
        for name, new in head.fields.items():
            known = partition.fields.setdefault(name, _Field(new.dtype))
            known.observe(new)
            known.cells += len(rows)
        for place, row in enumerate(rows):
            cell = (block, place)
            for name in head.fields:
                old = row.cells.get(name)
                if old is not None:
                    self._release(partition, name, old[0])
                row.cells[name] = cell

    def _release(self, partition: _Partition, name: str, block: _Block) -> None:
        known = partition.fields[name]
        known.cells -= 1
        if known.cells == 0:
            del partition.fields[name]
        block.live -= 1
        if block.live == 0:
            self.garbage.setdefault(block.head.unit, []).append(block.head.block_id)

    def clear(self, keys: Sequence[str], partition_id: str) -> int:
        """Delete rows whatever fields they have; unknown keys are ignored. Returns how many rows went."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            return 0
        gone = []
        for key in keys:
            row = partition.rows.pop(key, None)
            if row is None:
                continue
            for name, (block, _) in row.cells.items():
                self._release(partition, name, block)
            del self._by_index[row.index]
            for consumed in partition.consumed.values():
                consumed.discard(row.index)
            gone.append(key)
        self._row_count -= len(gone)
        self._touch(partition, gone)
        partition.tombstones.extend((key, partition.version) for key in gone)
        self._forget_old_tombstones(partition)
        return len(gone)

    def blocks_of(self, writer: str) -> list[str]:
        """Ids of a writer's blocks that hold a cell."""
        ids = {
            block.head.block_id
            for partition in self._partitions.values()
            for row in partition.rows.values()
            for block, _ in row.cells.values()
        }
        return sorted(block_id for block_id in ids if block_id.startswith(f"{writer}:"))

    def take_garbage(self) -> dict[int, list[str]]:
        """Ids of the blocks to free, by storage unit; they are the caller's from now on."""
        garbage, self.garbage = self.garbage, {}
        return garbage

    # -- changes -----------------------------------------------------------------------------------

    def _touch(self, partition: _Partition, keys: Sequence[str]) -> None:
        if not keys:
            return
        partition.version += 1
        for key in keys:
            partition.log[key] = partition.version
            partition.log.move_to_end(key)

    def _forget_old_tombstones(self, partition: _Partition) -> None:
        while len(partition.tombstones) > MAX_TOMBSTONES:
            key, version = partition.tombstones.popleft()
            if partition.log.get(key) == version:
                del partition.log[key]
                partition.floor = version

    def version(self, partition_id: str) -> int:
        """Grows by one with each call that changed a key or a tag of the partition; 0 for an unknown one."""
        partition = self._partitions.get(partition_id)
        return 0 if partition is None else partition.version

    def changes(self, partition_id: str, since_version: int) -> tuple[int, dict[str, Tag | None]]:
        """The current version and the tag of every key changed after `since_version`; None: the key was deleted.

        From version 0 on the answer is every row there is.

        Raises:
            WatchGapError: deletions after `since_version` are forgotten, or the version was never reached.
        """
        partition = self._partitions.get(partition_id) or _Partition()
        if since_version == 0:
            return partition.version, {key: row.tag for key, row in partition.rows.items()}
        if not partition.floor <= since_version <= partition.version:
            raise WatchGapError(
                f"the changes of partition {partition_id!r} since version {since_version} are not known (known: "
                f"{partition.floor} to {partition.version}). Forget what you hold and watch again from version 0"
            )
        changed = []
        for key in reversed(partition.log):
            if partition.log[key] <= since_version:
                break
            changed.append(key)
        rows = partition.rows
        return partition.version, {key: rows[key].tag if key in rows else None for key in reversed(changed)}

    # -- reading -----------------------------------------------------------------------------------

    def _rows(self, partition_id: str) -> dict[str, _Row]:
        partition = self._partitions.get(partition_id)
        return {} if partition is None else partition.rows

    def listing(self, partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
        """{partition: {key: tag}}, keys in creation order; {} for an unknown partition."""
        wanted = self._partitions if partition_id is None else [partition_id]
        return {
            name: {key: row.tag for key, row in self._partitions[name].rows.items()}
            for name in wanted
            if name in self._partitions
        }

    def locate(
        self,
        keys: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None,
        strict: bool,
        missing_ok: Sequence[str] = (),
    ) -> Location:
        """Where the cells of these rows are.

        Strict: an unknown key or an absent selected field is an error, unless the field is in `missing_ok`. Else
        unknown keys and absent fields are left out.

        Raises:
            StorageKeyNotFoundError, MissingFieldError: strict only.
            QueueArgumentError: no key is known (not strict).
            NotReadyError: the rows share no field.
        """
        known = self._rows(partition_id)
        unknown = [key for key in keys if key not in known]
        if unknown and strict:
            raise StorageKeyNotFoundError(
                f"partition {partition_id!r} has no key {some(unknown)} ({len(unknown)} of {len(keys)} requested keys "
                "are unknown). They were never put, or cleared before this read"
            )
        if len(unknown) == len(keys):
            raise QueueArgumentError(f"partition {partition_id!r} has none of the {len(keys)} requested keys")
        found = [key for key in keys if key in known]
        rows = [known[key] for key in found]
        common = _common_fields(rows)
        if select_fields is None:
            wanted = sorted(common)
        else:
            wanted = [name for name in dict.fromkeys(select_fields) if name in common]
            absent = [name for name in select_fields if name not in common and name not in missing_ok]
            if absent and strict:
                self._raise_missing(absent[0], found, rows, partition_id)
        if not common and not (strict and select_fields is not None):
            raise NotReadyError(
                f"the {len(found)} requested rows of partition {partition_id!r} have no field in common (first row: "
                f"{sorted(rows[0].cells) or 'only a tag'}); they are not ready to be read"
            )
        return self._locate_cells(partition_id, found, unknown, rows, wanted)

    def _raise_missing(self, name: str, keys: Sequence[str], rows: Sequence[_Row], partition_id: str) -> None:
        lacking = [(key, row) for key, row in zip(keys, rows, strict=True) if name not in row.cells]
        have = sorted(lacking[0][1].cells)
        raise MissingFieldError(
            f"field {name!r} is absent from {len(lacking)} of {len(keys)} requested rows of partition {partition_id!r} "
            f"({some([key for key, _ in lacking])}); the first of them has {have or 'no fields'}. Put the field before "
            "reading it, or name it in missing_ok if it is optional"
        )

    def _locate_cells(
        self, partition_id: str, keys: list[str], unknown: list[str], rows: Sequence[_Row], names: Sequence[str]
    ) -> Location:
        blocks: list[tuple[int, str, Extent | None]] = []
        number_of: dict[int, int] = {}
        cells = {}
        for name in names:
            which, places = [], []
            for row in rows:
                block, place = row.cells[name]
                number = number_of.get(id(block))
                if number is None:
                    number = number_of[id(block)] = len(blocks)
                    blocks.append((block.head.unit, block.head.block_id, block.head.extent))
                which.append(number)
                places.append(place)
            cells[name] = (np.array(which, np.int32), np.array(places, np.int32))
        fields = self._partitions[partition_id].fields
        return Location(keys, unknown, blocks, cells, {name: fields[name].ragged() for name in names})

    # -- the columnar view -------------------------------------------------------------------------

    def describe(self, keys: Sequence[str], partition_id: str) -> dict[str, Any]:
        """Row numbers, tags and the shapes of the common fields of existing rows, for a `BatchMeta`."""
        known = self._rows(partition_id)
        unknown = [key for key in keys if key not in known]
        if unknown:
            raise StorageKeyNotFoundError(f"partition {partition_id!r} has no key {some(unknown)}")
        rows = [known[key] for key in keys]
        fields = {}
        for name in sorted(_common_fields(rows)):
            cells = [row.cells[name] for row in rows]
            shapes = [row_shapes(block.head.fields[name].shapes[place : place + 1])[0] for block, place in cells]
            fields[name] = (cells[0][0].head.fields[name].dtype, shapes)
        return {"indexes": [row.index for row in rows], "tags": [row.tag for row in rows], "fields": fields}

    def keys_of(self, indexes: Sequence[int]) -> list[tuple[str, str]]:
        """(partition, key) of row numbers. Numbers are never reused, so a stale one is an error, not another row."""
        unknown = [index for index in indexes if index not in self._by_index]
        if unknown:
            raise StorageKeyNotFoundError(f"no rows with the numbers {unknown[:8]}: cleared, or never there")
        return [self._by_index[index] for index in indexes]

    def partitions(self) -> list[str]:
        """Names of all partitions, oldest first."""
        return [*self._partitions]

    # -- consumption and production ----------------------------------------------------------------

    def production(self, fields: Sequence[str], partition_id: str) -> tuple[list[int], list[int]]:
        """Row numbers of the partition, and 1 where all of `fields` are present."""
        rows = self._rows(partition_id).values()
        return [row.index for row in rows], [int(all(name in row.cells for name in fields)) for row in rows]

    def consumption(self, task: str, partition_id: str) -> tuple[list[int], list[int]]:
        """Row numbers of the partition, and 1 where `task` has consumed the row."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            return [], []
        seen = partition.consumed.setdefault(task, set())
        return [row.index for row in partition.rows.values()], [int(r.index in seen) for r in partition.rows.values()]

    def consume(self, task: str, keys: Sequence[str], partition_id: str) -> None:
        """Mark rows as consumed by `task`."""
        known = self._rows(partition_id)
        unknown = [key for key in keys if key not in known]
        if unknown:
            raise StorageKeyNotFoundError(f"partition {partition_id!r} has no key {some(unknown)} to mark as consumed")
        self._partitions[partition_id].consumed.setdefault(task, set()).update(known[key].index for key in keys)

    def reset_consumption(self, partition_id: str, task: str | None = None) -> bool:
        """Clear the marks of one task, or of all; False when there is no such partition."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            return False
        for name in list(partition.consumed) if task is None else [task]:
            partition.consumed.pop(name, None)
        return True


def _common_fields(rows: Sequence[_Row]) -> set[str]:
    common: set[str] | None = None
    for row in rows:
        common = set(row.cells) if common is None else common & row.cells.keys()
        if not common:
            return set()
    return common or set()
