"""`ChangeLog`: which rows of a partition changed after a version.

Invariants
    - Asking costs as much as has changed since, not as much as is held.
    - The log is at most about twice as long as there are rows and remembered deletions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rlflow.transfer_queue.errors import WatchGapError
from rlflow.transfer_queue.rows import Row

# Deletions that a watcher may lag behind before it must start anew: over a hundred steps of a large run.
MAX_TOMBSTONES = 200_000
_SLACK = 1024


class ChangeLog:
    """See the module's docstring.

    Args:
        start: the version to begin with; what changed up to it is not known.
    """

    def __init__(self, start: int = 0) -> None:
        self.version = start  # grows by one with each call that changed a key or a tag
        self.floor = start  # changes up to this version are forgotten
        self._entries: deque[tuple[int, Sequence[Row]]] = deque()
        self._size = 0
        self._superseded = 0
        self._deletions: deque[tuple[int, int]] = deque()  # (version, how many)
        self._deleted = 0

    def add(self, rows: Sequence[Row]) -> None:
        """One change of all these rows."""
        if not rows:
            return
        self.version = version = self.version + 1
        superseded = 0
        for row in rows:
            if row.version > self.floor:
                superseded += 1
            row.version = version
        self._entries.append((version, rows))
        self._size += len(rows)
        self._superseded += superseded
        if self._superseded > self._size // 2 + _SLACK:
            self._compact()

    def add_deleted(self, rows: Sequence[Row]) -> None:
        """One change: these rows, no longer alive, were deleted."""
        self.add(rows)
        if rows:
            self._deletions.append((self.version, len(rows)))
            self._deleted += len(rows)
            self._forget()

    def _compact(self) -> None:
        kept = [(version, [row for row in rows if row.version == version]) for version, rows in self._entries]
        self._entries = deque((version, rows) for version, rows in kept if rows)
        self._size = sum(len(rows) for _, rows in self._entries)
        self._superseded = 0

    def _forget(self) -> None:
        while self._deleted > MAX_TOMBSTONES:
            self.floor, count = self._deletions.popleft()
            self._deleted -= count
        while self._entries and self._entries[0][0] <= self.floor:
            version, rows = self._entries.popleft()
            self._size -= len(rows)
            self._superseded -= sum(row.version != version for row in rows)

    def since(self, version: int, partition_id: str) -> list[Row]:
        """Rows changed after `version`, each once, oldest change first; deleted ones are not alive.

        Raises:
            WatchGapError: deletions after `version` are forgotten, or the version was never reached.
        """
        if not self.floor <= version <= self.version:
            raise WatchGapError(
                f"the changes of partition {partition_id!r} since version {version} are not known (known: "
                f"{self.floor} to {self.version}). Forget what you hold and watch again from version 0"
            )
        found = []
        for changed_at, rows in reversed(self._entries):
            if changed_at <= version:
                break
            found.append((changed_at, rows))
        return [row for changed_at, rows in reversed(found) for row in rows if row.version == changed_at]
