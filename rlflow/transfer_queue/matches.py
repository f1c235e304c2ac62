"""`Matches`: the keys of a partition that fulfil a predicate, kept current by the changes of the partition.

Invariant: after the first look, a look costs as much as has changed since, or as many keys as are awaited, whichever is
less; never as much as is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rlflow.transfer_queue.errors import WatchGapError, some
from rlflow.transfer_queue.predicate import Predicate
from rlflow.transfer_queue.rows import Row, tagged
from rlflow.transfer_queue.table import Table
from rlflow.transfer_queue.tags import TaggedKeys


class Matches:
    """See the module's docstring.

    Args:
        table: returns the table; it may be another one after a checkpoint was loaded.
        partition_id: the partition; need not exist yet.
        predicate: what a row's tag must fulfil.
        keys: the keys that count; None: all.
        since_version: only rows changed after this version count; 0: all.
    """

    def __init__(
        self,
        table: Callable[[], Table],
        partition_id: str,
        predicate: Predicate,
        keys: Sequence[str] | None = None,
        since_version: int = 0,
    ) -> None:
        self._table = table
        self._partition_id = partition_id
        self._predicate = predicate
        self._wanted = None if keys is None else dict.fromkeys(keys)
        self._since = since_version
        self._matching: dict[str, Row] = {}
        self.version = since_version
        if since_version == 0:
            self._start()
        self.refresh()

    def __len__(self) -> int:
        return len(self._matching)

    def tagged(self) -> TaggedKeys:
        """The matching keys and their tags."""
        return tagged(self._matching.values())

    def _start(self) -> None:
        """Look at all there is."""
        partition = self._table().partition(self._partition_id)
        self.version = partition.log.version
        self._matching = {}
        if self._wanted is None:
            self._take(partition.rows.values())
        else:
            self._take(partition.rows[key] for key in self._wanted if key in partition.rows)

    def _take(self, rows: Iterable[Row]) -> None:
        places: dict[int, int | None] = {}  # by the names tuple that rows share
        tag, wanted = self._predicate.tag, self._predicate.wanted()
        matching = self._matching
        for row in rows:
            names = row.names
            if id(names) not in places:
                places[id(names)] = names.index(tag) if tag in names else None
            place = places[id(names)]
            if place is not None and row.values[place] in wanted:
                matching[row.key] = row
            else:
                matching.pop(row.key, None)

    def refresh(self) -> None:
        """Take in what has changed.

        Raises:
            WatchGapError: changes after `since_version` are no longer known.
        """
        partition = self._table().partition(self._partition_id)
        if partition.log.version == self.version:
            return
        try:
            changed = partition.log.since(self.version, self._partition_id)
        except WatchGapError:
            if self._since != 0:
                raise
            self._start()
            return
        self.version = partition.log.version
        if self._wanted is None:
            self._take(changed)
        else:
            self._take(row for row in changed if row.key in self._wanted)

    def describe_lacking(self, count: int) -> str:
        """What there is instead of `count` matching keys, for messages."""
        rows = self._table().partition(self._partition_id).rows
        text = f"{len(self)} of {count} keys have {self._predicate.describe()}"
        others = [key for key in (rows if self._wanted is None else self._wanted) if key not in self._matching]
        if not others:
            return f"{text}; no other keys are there"
        first = [key for key in others if key in rows][:4]
        states = [f"{key}: {rows[key].tag.get(self._predicate.tag)!r}" for key in first]
        states += [f"{key}: not there" for key in others if key not in rows][: 4 - len(first)]
        more = f" and {len(others) - len(states)} more" if len(others) > len(states) else ""
        return f"{text}; the others: {some(states)}{more}"
