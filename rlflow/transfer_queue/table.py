"""`Table`: keys, tags and the place of every cell. Pure bookkeeping: no Ray, no waiting, no cell contents.

Invariants
    - Each method checks first and changes afterwards: an error leaves the table as it was.
    - A tag is never changed in place but replaced, so that a reply or a snapshot may hold it while writers go on.
    - `garbage` holds the blocks without a live cell; whoever called a method frees them.
    - Finding what changed since a version costs as much as has changed, not as much as is held.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from rlflow.transfer_queue.capacity import Bounds
from rlflow.transfer_queue.commit import BlockHead, PutReply
from rlflow.transfer_queue.errors import (
    DtypeConflictError,
    QueueUnavailableError,
    StorageUnitLostError,
    TagConflictError,
    some,
)
from rlflow.transfer_queue.fields import compact_shapes, schema_of
from rlflow.transfer_queue.locate import Location, locate
from rlflow.transfer_queue.partition import Freed, Partition, common_fields
from rlflow.transfer_queue.rows import Block, Extent, Row, writer_of
from rlflow.transfer_queue.table_rows import RowNumbers
from rlflow.transfer_queue.tags import Tag, TagBatch, check_names, pack_batch

__all__ = ["BlockHead", "Extent", "Location", "PutReply", "Table", "Tag", "some"]


class Table(RowNumbers):
    """All partitions.

    Args:
        bounds: what may be held at a time over all partitions.
    """

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self.garbage: dict[int, list[str]] = {}
        self.lost_units: dict[int, str] = {}  # storage unit -> why it is gone
        self.row_count = 0
        self._partitions: dict[str, Partition] = {}
        self._by_index: dict[int, Row] = {}
        self.next_index = 0
        self.commits = 0
        self._blocks: dict[str, dict[str, Block]] = {}  # by writer, then by id
        self._abandoned: set[str] = set()

    @classmethod
    def restored(
        cls, bounds: Bounds, partitions: Iterable[Partition], blocks: Iterable[Block], next_index: int, commits: int
    ) -> Table:
        """A table of these partitions, whose rows refer to these blocks."""
        table = cls(bounds)
        table.next_index, table.commits = next_index, commits
        for partition in partitions:
            table._partitions[partition.name] = partition
            table._by_index.update({row.index: row for row in partition.rows.values()})
            table.row_count += len(partition.rows)
        for block in blocks:
            table._register(block)
        return table

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(partition.nbytes for partition in self._partitions.values())

    # -- writing -----------------------------------------------------------------------------------

    def rows_to_add(self, keys: Sequence[str], partition_id: str) -> int:
        """How many of the keys are new."""
        rows = self._rows(partition_id)
        return len(keys) - sum(map(rows.__contains__, keys))

    def has_room(self, keys: Sequence[str], partition_id: str, head: BlockHead | None) -> bool:
        """Whether a put fits. Only new rows with fields can lack room.

        Tags and markers always fit, so that whoever has to make room is never kept from saying what it is doing.
        """
        if head is None:
            return True
        new = self.rows_to_add(keys, partition_id)
        nbytes = 0 if self.bounds.nbytes is None else self.nbytes + head.nbytes
        return not new or self.bounds.fit(self.row_count + new, nbytes)

    def check_room(self, keys: Sequence[str], partition_id: str, head: BlockHead | None) -> None:
        """`CapacityError` unless a put fits."""
        if not self.has_room(keys, partition_id, head):
            assert head is not None, "a put without fields always fits"
            held = {p.name: (len(p.rows), p.nbytes) for p in self._partitions.values()}
            raise self.bounds.error(self.rows_to_add(keys, partition_id), head.nbytes, partition_id, held)

    def check_head(self, partition_id: str, head: BlockHead) -> None:
        """Raise if a block cannot become part of the table.

        Raises:
            DtypeConflictError: a field has another dtype in the partition.
            StorageUnitLostError: the storage unit that holds the block is gone.
            QueueUnavailableError: its writer was given up as dead.
        """
        known = self._partitions[partition_id].fields if partition_id in self._partitions else {}
        for name, new in head.fields.items():
            if name in known and known[name].dtype != new.dtype:
                raise DtypeConflictError(
                    f"field {name!r} of partition {partition_id!r} holds {known[name].dtype}, the put offers "
                    f"{new.dtype}. A field has one dtype: cast the values, or use another field name. Nothing of this "
                    "put was stored"
                )
        if head.unit in self.lost_units:
            raise StorageUnitLostError(
                f"storage unit {head.unit} ({self.lost_units[head.unit]}) was lost together with a block of fields "
                f"{some([*head.fields])} for partition {partition_id!r} before it was committed. Put again"
            )
        if writer_of(head.block_id) in self._abandoned:
            raise QueueUnavailableError(
                f"the table has given up the writer of a put into partition {partition_id!r} as dead and freed what it "
                "had written. If that process lives, it was stopped for long; end it, or let it connect anew (close)"
            )

    def put(
        self,
        keys: Sequence[str],
        partition_id: str,
        tags: TagBatch | Sequence[Tag] | None = None,
        head: BlockHead | None = None,
        expect: Sequence[Tag] | None = None,
    ) -> PutReply:
        """Commit: create missing rows, place the block's cells, merge the tags.

        `expect` names for each row tag entries that must be so before; an absent entry counts as None.

        Raises:
            CapacityError, TagConflictError: nothing has changed then; also after any error of `check_head`.
        """
        batch = tags if tags is None or isinstance(tags, TagBatch) else TagBatch.of(tags)
        if batch is not None:
            check_names(batch)
        if head is not None:
            self.check_head(partition_id, head)
            self.check_room(keys, partition_id, head)
        if expect is not None:
            self._check_expected(keys, partition_id, expect)
        partition = self._partitions.get(partition_id)
        if partition is None:
            partition = self._partitions[partition_id] = Partition(partition_id)
        partition.listed = True
        rows, made = partition.find_or_make(keys, self.next_index)
        self._by_index.update(zip(count(self.next_index), made, strict=False))
        self.next_index += len(made)
        self.row_count += len(made)
        self.commits += 1
        if batch is None:
            differing = [number for number, row in enumerate(rows) if row.names]
            changed = made
        else:
            differing = partition.merge_tags(rows, batch)
            changed = rows
        if head is not None:
            changed = self._place(partition, rows, changed, head)
        partition.log.add(changed)
        after = TagBatch([rows[i].names for i in differing], [rows[i].values for i in differing])
        return PutReply(differing, pack_batch(after) if differing else b"", sorted(common_fields(rows)))

    def _place(self, partition: Partition, rows: list[Row], changed: list[Row], head: BlockHead) -> list[Row]:
        """Commit a block; returns the rows that the put has changed."""
        block = Block(
            head.unit,
            head.block_id,
            head.extent,
            head.nbytes,
            schema_of(head.fields),
            compact_shapes(head.fields),
            sys.intern(head.writer),
            time.time(),
            self.commits,
        )
        self._register(block)
        freed, recovered = partition.place(rows, block)
        for name, column in head.fields.items():
            partition.fields[name].observe(column)
        self._discard(freed)
        if not recovered or len(changed) == len(rows):
            return changed
        return list({row.key: row for row in (*changed, *recovered)}.values())

    def _register(self, block: Block) -> None:
        self._blocks.setdefault(writer_of(block.block_id), {})[block.block_id] = block

    def blocks(self) -> list[Block]:
        """All blocks, oldest first."""
        blocks = [block for of_writer in self._blocks.values() for block in of_writer.values()]
        return sorted(blocks, key=lambda block: block.commit)

    def _discard(self, freed: Freed) -> None:
        for block in freed:
            writer = writer_of(block.block_id)
            blocks = self._blocks[writer]
            del blocks[block.block_id]
            if not blocks:
                del self._blocks[writer]
            self.garbage.setdefault(block.unit, []).append(block.block_id)

    def _check_expected(self, keys: Sequence[str], partition_id: str, expect: Sequence[Tag]) -> None:
        rows = self._rows(partition_id)
        for key, entries in zip(keys, expect, strict=True):
            tag = rows[key].tag if key in rows else {}
            for name, value in entries.items():
                if tag.get(name) != value:
                    raise TagConflictError(
                        f"tag entry {name!r} of key {key!r} in partition {partition_id!r} is {tag.get(name)!r}, not "
                        f"{value!r} as expected; another process was faster. Nothing of this put was stored"
                    )

    def clear(self, keys: Sequence[str], partition_id: str) -> int:
        """Delete rows whatever fields they have; unknown keys are ignored. Returns how many rows went."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            return 0
        gone, freed = partition.remove(keys)
        self._discard(freed)
        for row in gone:
            del self._by_index[row.index]
        self.row_count -= len(gone)
        return len(gone)

    def drop(self, partition_id: str) -> int:
        """Delete all rows and marks of a partition, and stop listing it until the next put; returns how many went.

        Its versions go on, so that a watcher sees the deletions.
        """
        partition = self._partitions.get(partition_id)
        if partition is None:
            return 0
        count = self.clear(list(partition.rows), partition_id)
        partition.consumed.clear()
        partition.listed = False
        return count

    def set_tags(self, keys: Sequence[str], partition_id: str, tags: Sequence[Tag]) -> None:
        """Replace the tags of existing rows, where `put` merges."""
        batch = TagBatch.of(tags)
        check_names(batch)
        rows = self._known(keys, partition_id)
        self._partitions[partition_id].replace_tags(rows, batch)

    def take_garbage(self) -> dict[int, list[str]]:
        """Ids of the blocks to free, by storage unit; they are the caller's from now on."""
        garbage, self.garbage = self.garbage, {}
        return garbage

    def take_over(self, former: Table) -> None:
        """Replace a table of the same storage: know what it knew of units and writers, and go on with its numbers."""
        self._abandoned = former._abandoned
        self.next_index = max(self.next_index, former.next_index)
        self.commits = max(self.commits, former.commits)
        for unit, reason in former.lost_units.items():
            self.lose_unit(unit, reason)

    # -- lost storage and dead writers -------------------------------------------------------------

    def lose_unit(self, unit: int, reason: str) -> list[str]:
        """A storage unit is gone with all its blocks. Returns the partitions that have changed.

        Each row concerned gets the tag entry `tq_lost` until the fields are put again or the row is cleared. A second
        call for the same unit does nothing.
        """
        if unit in self.lost_units:
            return []
        self.lost_units[unit] = reason
        self.garbage.pop(unit, None)
        lost = {block for blocks in self._blocks.values() for block in blocks.values() if block.unit == unit}
        changed = []
        for partition in self._partitions.values():
            before = partition.log.version
            partition.lose(lost, unit)
            if partition.log.version != before:
                changed.append(partition.name)
        for block in lost:
            del self._blocks[writer_of(block.block_id)][block.block_id]
        return changed

    def abandon(self, writer: str) -> list[str]:
        """Refuse what this writer may still want to commit; returns the ids of its live blocks."""
        self._abandoned.add(writer)
        return [*self._blocks.get(writer, ())]

    # -- changes -----------------------------------------------------------------------------------

    def version(self, partition_id: str) -> int:
        """Grows by one with each call that changed a key or a tag of the partition; 0 for an unknown one."""
        partition = self._partitions.get(partition_id)
        return 0 if partition is None else partition.log.version

    def highest_version(self) -> int:
        """The highest version of all partitions."""
        return max((partition.log.version for partition in self._partitions.values()), default=0)

    def changes(self, partition_id: str, since_version: int) -> tuple[int, dict[str, Tag | None]]:
        """The current version and the tag of every key changed after `since_version`; None: the key was deleted.

        From version 0 on the answer is every row there is.

        Raises:
            WatchGapError: deletions after `since_version` are forgotten, or the version was never reached.
        """
        version, rows = self.changed_rows(partition_id, since_version)
        return version, {row.key: row.tag if row.alive else None for row in rows}

    def changed_rows(self, partition_id: str, since_version: int) -> tuple[int, Iterable[Row]]:
        """As `changes`, with the rows themselves; a deleted one is not alive."""
        partition = self.partition(partition_id)
        if since_version == 0:
            return partition.log.version, partition.rows.values()
        return partition.log.version, partition.log.since(since_version, partition_id)

    # -- reading -----------------------------------------------------------------------------------

    def partition(self, partition_id: str) -> Partition:
        """The partition of this name; an empty one that is not part of the table if there is none."""
        return self._partitions.get(partition_id) or Partition(partition_id)

    def _rows(self, partition_id: str) -> Mapping[str, Row]:
        partition = self._partitions.get(partition_id)
        return {} if partition is None else partition.rows

    def listing(self, partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
        """{partition: {key: tag}}, keys in creation order; {} for an unknown partition."""
        wanted = self._partitions if partition_id is None else [partition_id]
        return {
            name: {key: row.tag for key, row in self._partitions[name].rows.items()}
            for name in wanted
            if name in self._partitions and self._partitions[name].listed
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
            StorageUnitLostError: strict only: a field was lost with its storage unit.
            QueueArgumentError: no key is known (not strict).
            NotReadyError: the rows share no field.
        """
        return locate(keys, self.partition(partition_id), select_fields, strict, missing_ok, self.lost_units)

    def lineage(
        self, keys: Sequence[str], partition_id: str, fields: Sequence[str] | None
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """{key: {field: {"writer", "time", "version"}}} of the fields that each row has, or of those of `fields`.

        Raises:
            StorageKeyNotFoundError: an unknown key.
        """
        result: dict[str, dict[str, dict[str, Any]]] = {}
        records: dict[Block, dict[str, Any]] = {}
        for row in self._known(keys, partition_id):
            of_row = result[row.key] = {}
            for name in sorted(row.fields if fields is None else row.fields.intersection(fields)):
                block, _ = row.cell(name)
                if block not in records:
                    records[block] = {"writer": block.writer, "time": block.written, "version": block.commit}
                of_row[name] = records[block]
        return result
