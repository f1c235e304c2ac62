"""The part of `Table` that knows rows by number and by task: what the low-level client sees.

Invariants
    - A row's number is never given to another row, so a number names its row or nothing.
    - `consumed` marks are kept until the row is cleared or they are reset; a put never touches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlflow.transfer_queue.errors import StorageKeyNotFoundError, some
from rlflow.transfer_queue.fields import shape_at
from rlflow.transfer_queue.partition import Partition, common_fields
from rlflow.transfer_queue.rows import Row


class RowNumbers:
    """Mixin of `Table`."""

    _partitions: dict[str, Partition]
    _by_index: dict[int, Row]

    def describe(self, keys: Sequence[str], partition_id: str) -> dict[str, Any]:
        """Row numbers, tags and the shapes of the common fields of existing rows, for a `BatchMeta`."""
        rows = self._known(keys, partition_id)
        fields = {}
        for name in sorted(common_fields(rows)):
            cells = [row.cell(name) for row in rows]
            at = [block.schema.names.index(name) for block, _ in cells]
            shapes = [shape_at(block.shapes[i], place) for i, (block, place) in zip(at, cells, strict=True)]
            fields[name] = (cells[0][0].schema.dtypes[at[0]], shapes)
        return {"indexes": [row.index for row in rows], "tags": [row.tag for row in rows], "fields": fields}

    def _known(self, keys: Sequence[str], partition_id: str) -> list[Row]:
        rows = self._partitions[partition_id].rows if partition_id in self._partitions else {}
        unknown = [key for key in keys if key not in rows]
        if unknown:
            raise StorageKeyNotFoundError(f"partition {partition_id!r} has no key {some(unknown)}")
        return [rows[key] for key in keys]

    def keys_of(self, indexes: Sequence[int]) -> list[tuple[str, str]]:
        """(partition, key) of row numbers. Numbers are never reused, so a stale one is an error, not another row."""
        unknown = [index for index in indexes if index not in self._by_index]
        if unknown:
            raise StorageKeyNotFoundError(f"no rows with the numbers {unknown[:8]}: cleared, or never there")
        return [(self._by_index[index].partition, self._by_index[index].key) for index in indexes]

    def partitions(self) -> list[str]:
        """Names of all partitions, oldest first."""
        return [*self._partitions]

    # -- consumption and production ----------------------------------------------------------------

    def production(self, fields: Sequence[str], partition_id: str) -> tuple[list[int], list[int]]:
        """Row numbers of the partition, and 1 where all of `fields` are present."""
        partition = self._partitions.get(partition_id)
        rows = [] if partition is None else [*partition.rows.values()]
        return [row.index for row in rows], [int(row.fields.issuperset(fields)) for row in rows]

    def consumption(self, task: str, partition_id: str) -> tuple[list[int], list[int]]:
        """Row numbers of the partition, and 1 where `task` has consumed the row."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            return [], []
        seen = partition.consumed.setdefault(task, set())
        return [row.index for row in partition.rows.values()], [int(r.index in seen) for r in partition.rows.values()]

    def consume(self, task: str, keys: Sequence[str], partition_id: str) -> None:
        """Mark rows as consumed by `task`."""
        rows = self._known(keys, partition_id)
        self._partitions[partition_id].consumed.setdefault(task, set()).update(row.index for row in rows)

    def reset_consumption(self, partition_id: str, task: str | None = None) -> bool:
        """Clear the marks of one task, or of all; False when there is no such partition."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            return False
        for name in list(partition.consumed) if task is None else [task]:
            partition.consumed.pop(name, None)
        return True
