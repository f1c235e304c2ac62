"""Which rows a task may fetch, and giving them out: the choice of the sampler and its marks are one step.

Invariants
    - `choose` neither waits nor yields, so two consumers of one task never get one row.
    - A put costs a look at its own rows for each open view, not at all rows held.
    - A view holds exactly the rows that have all its fields and that its task has not consumed, and perhaps some that
      have been cleared since; those are dropped when it is read.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.transfer_queue.errors import QueueRequestError, StorageKeyNotFoundError
from rlflow.transfer_queue.samplers import BaseSampler
from rlflow.transfer_queue.table import Table
from rlflow.transfer_queue.tags import Tag

# Views are rebuilt when they are needed again, so this bounds memory only.
MAX_VIEWS = 64

# Keys that `low_level` gives to rows that were put without one.
GENERATED_PREFIX = "tq_row:"
_TRAJECTORY = re.compile(r"(.+)_\d+_\d+")


class PartitionRows:
    """What a sampler may ask about the rows of a partition (its keyword `partition`)."""

    def __init__(self, table: Table, partition_id: str) -> None:
        self.partition_id = partition_id
        self._table = table

    def get_custom_meta(self, indexes: Sequence[int]) -> dict[int, Tag]:
        """Tag of each row."""
        return dict(zip(indexes, self._table.tags_of(indexes), strict=True))

    def keys(self, indexes: Sequence[int]) -> dict[int, str]:
        """Key of each row."""
        return {index: key for index, (_, key) in zip(indexes, self._table.keys_of(indexes), strict=True)}

    def group_of(self, indexes: Sequence[int]) -> dict[int, Any]:
        """The prompt of each row: its tag entry `uid`, else that of a key `{uid}_{session}_{index}`, else None."""
        keys = self.keys(indexes)
        groups: dict[int, Any] = {}
        for index, tag in self.get_custom_meta(indexes).items():
            key = _TRAJECTORY.fullmatch(keys[index])
            groups[index] = tag["uid"] if "uid" in tag else key[1] if key is not None else None
        return groups


@dataclass(slots=True)
class _View:
    """Rows that one task may fetch when it asks for `fields`."""

    fields: frozenset[str]
    open: set[int]


class Fetches:
    """Gives rows to tasks.

    Args:
        table: the table.
        sampler: chooses among the rows that are ready.
    """

    def __init__(self, table: Table, sampler: BaseSampler) -> None:
        self.sampler = sampler
        self._table = table
        # (partition, task, fields) -> view, the least recently used first.
        self._views: OrderedDict[tuple[str, str, frozenset[str]], _View] = OrderedDict()

    def choose(
        self, fields: Sequence[str], batch_size: int, partition_id: str, task: str, config: dict[str, Any]
    ) -> list[int] | None:
        """Rows for `task`, marked as consumed; None when there are too few.

        Args:
            fields: what the rows must have.
            batch_size: how many rows, in the sampler's sense.
            partition_id: their partition.
            task: who consumes them.
            config: the caller's `sampling_config`.

        Raises:
            QueueRequestError: the sampler lacks an entry of `config`, or returned rows that it was not offered, or one
                twice.
            StorageKeyNotFoundError: the sampler remembers rows that have been cleared.
        """
        view = self._view(partition_id, task, fields)
        view.open = set(self._table.existing(view.open))
        remembered = self.sampler.has_cached_result(partition_id, task, config)
        if len(view.open) < batch_size and not remembered:
            return None
        options = {"task_name": task, "partition_id": partition_id, **config}
        try:
            rows, consumed = self.sampler(
                sorted(view.open), batch_size, partition=PartitionRows(self._table, partition_id), **options
            )
        except TypeError as error:
            raise QueueRequestError(
                f"{type(self.sampler).__name__} cannot work with sampling_config={config}: {error}"
            ) from error
        if not rows:
            return None
        self._check(rows, consumed, view, partition_id, task)
        self.consume(task, consumed, partition_id)
        return list(rows)

    def has(self, count: int, fields: Sequence[str], partition_id: str, task: str) -> bool:
        """Whether `count` rows may be open to the task."""
        return len(self._view(partition_id, task, fields).open) >= count

    def _check(self, rows: Sequence[int], consumed: Sequence[int], view: _View, partition_id: str, task: str) -> None:
        name = type(self.sampler).__name__
        if len(set(rows)) != len(rows):
            raise QueueRequestError(f"{name} chose a row twice: {list(rows)[:16]}; a row may occur once in a batch")
        gone = sorted({*rows, *consumed} - set(self._table.existing({*rows, *consumed})))
        if gone:
            raise StorageKeyNotFoundError(
                f"{name} remembers rows {gone[:8]} of partition {partition_id!r} for this batch_index, which have been "
                "cleared; ask for the next batch_index, or start the partition anew with clear_partition"
            )
        strange = sorted(set(rows) - view.open - self._table.consumed_by(task, partition_id))
        if strange:
            raise QueueRequestError(
                f"{name} chose rows {strange[:8]}, which lack a requested field; choose among ready_indexes"
            )

    def _view(self, partition_id: str, task: str, fields: Sequence[str]) -> _View:
        key = (partition_id, task, frozenset(fields))
        view = self._views.get(key)
        if view is None:
            ready = self._table.indexes(partition_id, None, fields)
            view = _View(key[2], set(ready) - self._table.consumed_by(task, partition_id))
            self._views[key] = view
        self._views.move_to_end(key)
        while len(self._views) > MAX_VIEWS:
            self._views.popitem(last=False)
        return view

    # -- what changes the views --------------------------------------------------------------------

    def committed(self, partition_id: str, keys: Sequence[str], fields: Iterable[str]) -> None:
        """Rows `keys` have got `fields`."""
        if not self._views:
            return
        new = set(fields)
        for (partition, task, wanted), view in self._views.items():
            if partition == partition_id and wanted & new:
                ready = self._table.indexes(partition_id, keys, list(wanted))
                view.open |= set(ready) - self._table.consumed_by(task, partition_id)

    def consume(self, task: str, indexes: Sequence[int], partition_id: str) -> None:
        """Mark rows of a partition as consumed by `task`."""
        self._table.consume(task, indexes)
        for (partition, consumer, _), view in self._views.items():
            if partition == partition_id and consumer == task:
                view.open -= set(indexes)

    def forget(self, partition_id: str | None = None) -> None:
        """Rebuild the views (of a partition) from the table: after marks were reset or cells were lost."""
        for key in [key for key in self._views if partition_id is None or key[0] == partition_id]:
            del self._views[key]

    def drop(self, partition_id: str) -> None:
        """The partition was dropped: forget its views and the sampler's choices for it."""
        self.forget(partition_id)
        self.sampler.clear_cache(partition_id)
