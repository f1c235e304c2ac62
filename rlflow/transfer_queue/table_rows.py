"""The part of `Table` that knows rows by number and by task: what the low-level client sees.

Invariants
    - A row's number is never given to another row, so a number names its row or nothing.
    - `consumed` marks are kept until the row is cleared or they are reset; a put never touches them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlflow.transfer_queue.errors import StorageKeyNotFoundError, some
from rlflow.transfer_queue.fields import shape_at
from rlflow.transfer_queue.partition import Partition, common_fields
from rlflow.transfer_queue.rows import Block, Row
from rlflow.transfer_queue.tags import Tag

# Per field: dtype name, and the shape of each row; None for a row that has no tensor there.
Shapes = dict[str, tuple[str, list[tuple[int, ...] | None]]]


class RowNumbers:
    """Mixin of `Table`."""

    _partitions: dict[str, Partition]
    _by_index: dict[int, Row]
    _blocks: dict[str, dict[str, Block]]
    lost_units: dict[int, str]
    next_index: int

    def _known(self, keys: Sequence[str], partition_id: str) -> list[Row]:
        rows = self._partitions[partition_id].rows if partition_id in self._partitions else {}
        unknown = [key for key in keys if key not in rows]
        if unknown:
            raise StorageKeyNotFoundError(f"partition {partition_id!r} has no key {some(unknown)}")
        return [rows[key] for key in keys]

    # -- which rows there are ----------------------------------------------------------------------

    def partitions(self) -> list[str]:
        """Names of all partitions, oldest first."""
        return [name for name, partition in self._partitions.items() if partition.listed]

    def indexes(self, partition_id: str, keys: Iterable[str] | None = None, fields: Sequence[str] = ()) -> list[int]:
        """Numbers of the rows that have all of `fields`, of `keys` (unknown ones are left out) or of the partition."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            return []
        known = partition.rows
        rows = known.values() if keys is None else [known[key] for key in keys if key in known]
        return [row.index for row in rows if row.fields.issuperset(fields)]

    def existing(self, indexes: Iterable[int]) -> list[int]:
        """Those of the numbers that name a row."""
        return [index for index in indexes if index in self._by_index]

    def keys_of(self, indexes: Sequence[int]) -> list[tuple[str, str]]:
        """(partition, key) of row numbers. Numbers are never reused, so a stale one is an error, not another row."""
        unknown = [index for index in indexes if index not in self._by_index]
        if unknown:
            raise StorageKeyNotFoundError(f"no rows with the numbers {unknown[:8]}: cleared, or never there")
        return [(self._by_index[index].partition, self._by_index[index].key) for index in indexes]

    def tags_of(self, indexes: Iterable[int]) -> list[Tag]:
        """Tags of existing rows."""
        return [self._by_index[index].tag for index in indexes]

    # -- what they hold ----------------------------------------------------------------------------

    def describe(self, indexes: Sequence[int], names: Sequence[str] | None, partition_id: str) -> dict[str, Any]:
        """What a `BatchMeta` tells about existing rows of a partition.

        Args:
            indexes: their numbers.
            names: the fields to describe, those no row of the partition has are left out; None: those all rows have.
            partition_id: their partition.

        Returns:
            `indexes`, `tags`, `fields` (see `Shapes`), and `ready`: 1 for a row that has all of `names`.
        """
        rows = [self._by_index[index] for index in indexes]
        partition = self._partitions.get(partition_id)
        known = sorted(partition.fields) if partition is not None else []
        wanted = known if names is None else [name for name in dict.fromkeys(names) if name in known]
        if names is None and rows:
            wanted = sorted(common_fields(rows))
        needed = wanted if names is None else names
        return {
            "indexes": list(indexes),
            "tags": [row.tag for row in rows],
            "fields": {name: _shapes(name, rows) for name in wanted},
            "ready": [int(bool(needed) and row.fields.issuperset(needed)) for row in rows],
        }

    def production(self, fields: Sequence[str], partition_id: str) -> tuple[list[int], np.ndarray, bool]:
        """Which rows of a partition have which fields.

        Returns:
            Row numbers; int8 [N, F], 1 where the row has the field; whether the partition and all fields are known.
        """
        partition = self._partitions.get(partition_id)
        if partition is None or not partition.listed:
            return [], np.zeros((0, len(fields)), np.int8), False
        rows = partition.rows.values()
        status = np.array([[name in row.fields for name in fields] for row in rows], np.int8)
        known = bool(fields) and all(name in partition.fields for name in fields)
        return [row.index for row in rows], status.reshape(len(rows), len(fields)), known

    def figures(self) -> dict[str, Any]:
        """For metrics; costs by partition and by block, not by row.

        `partitions`: {name: `rows`, `production` (share of the cells that are there), `consumption` ({task: share of
        the rows})}; `blocks`: {storage unit: (blocks, bytes)}; `next_index`; `lost_units` (how many).
        """
        partitions = {}
        for name in self.partitions():
            partition = self._partitions[name]
            count = len(partition.rows)
            cells = [state.cells for state in partition.fields.values()]
            partitions[name] = {
                "rows": count,
                "production": sum(cells) / (count * len(cells)) if cells and count else 0.0,
                "consumption": {task: len(seen) / max(count, 1) for task, seen in partition.consumed.items()},
            }
        blocks: dict[str, tuple[int, int]] = {}
        for of_writer in self._blocks.values():
            for block in of_writer.values():
                number, nbytes = blocks.get(str(block.unit), (0, 0))
                blocks[str(block.unit)] = (number + 1, nbytes + block.nbytes)
        lost = len(self.lost_units)
        return {"partitions": partitions, "blocks": blocks, "next_index": self.next_index, "lost_units": lost}

    # -- what a task has consumed ------------------------------------------------------------------

    def consumption(self, task: str, partition_id: str) -> tuple[list[int], np.ndarray, bool]:
        """Row numbers of a partition; int8 [N], 1 where `task` has consumed the row; whether the partition is known."""
        partition = self._partitions.get(partition_id)
        if partition is None or not partition.listed:
            return [], np.zeros(0, np.int8), False
        seen = partition.consumed.get(task, set())
        indexes = [row.index for row in partition.rows.values()]
        return indexes, np.array([index in seen for index in indexes], np.int8), True

    def consume(self, task: str, indexes: Sequence[int]) -> None:
        """Mark rows as consumed by `task`; `StorageKeyNotFoundError` for a number without a row."""
        for index, (partition, _) in zip(indexes, self.keys_of(indexes), strict=True):
            self._partitions[partition].consumed.setdefault(task, set()).add(index)

    def consumed_by(self, task: str, partition_id: str) -> set[int]:
        """Numbers of the rows that `task` has consumed; the table's own set, not to be changed."""
        partition = self._partitions.get(partition_id)
        return set() if partition is None else partition.consumed.get(task, set())

    def reset_consumption(self, partition_id: str, task: str | None = None) -> bool:
        """Clear the marks of one task, or of all; False when there is no such partition."""
        partition = self._partitions.get(partition_id)
        if partition is None or not partition.listed:
            return False
        for name in list(partition.consumed) if task is None else [task]:
            partition.consumed.pop(name, None)
        return True


def _shapes(name: str, rows: Sequence[Row]) -> tuple[str, list[tuple[int, ...] | None]]:
    dtype = ""
    shapes: list[tuple[int, ...] | None] = []
    for row in rows:
        if name not in row.fields:
            shapes.append(None)
            continue
        block, place = row.cell(name)
        column = block.schema.names.index(name)
        dtype = block.schema.dtypes[column]
        shapes.append(shape_at(block.shapes[column], place))
    return dtype, shapes
