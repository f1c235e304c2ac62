"""What can go wrong at the table. Each class carries one message, so that it survives the way between processes."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.utils.errors import CheckpointError, DeadlineError, RlflowError


def some(names: Sequence[str], limit: int = 4) -> str:
    """The first few names of a list, for messages."""
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


class TransferQueueError(RlflowError):
    """Base of the table's errors."""

    def __str__(self) -> str:
        # KeyError, a base of some subclasses, would show the repr of the message.
        return str(self.args[0]) if self.args else ""


class QueueArgumentError(TransferQueueError, ValueError):
    """A call's arguments contradict each other or are empty."""


class QueueRequestError(QueueArgumentError, RuntimeError):
    """A low-level call asks for what cannot be; also a RuntimeError, which is what the public package raises."""


class QueueTypeError(TransferQueueError, TypeError):
    """A key or a value of a type that the table does not store; the message names the field."""


class DtypeConflictError(QueueTypeError):
    """A put offers a field with another dtype than its partition holds. Nothing of that put was stored."""


class StorageKeyNotFoundError(TransferQueueError, KeyError):
    """A key (or row index) is not in the partition, or was cleared while it was being read."""


class StorageUnitLostError(StorageKeyNotFoundError):
    """Cells were lost with the storage unit that held them; the message names unit, fields and keys."""


class MissingFieldError(TransferQueueError, KeyError):
    """A selected field is absent from a requested row."""


class NotReadyError(TransferQueueError, ValueError):
    """The requested rows share no field; rows that only have a tag have none."""


class FetchTimeoutError(TransferQueueError, DeadlineError, RuntimeError):
    """A fetch waited for rows that did not become ready in time."""


class CapacityError(TransferQueueError):
    """The table holds as many rows or bytes as it may, and no room was made in time."""


class TagConflictError(TransferQueueError):
    """A put's `expect` does not hold. Nothing of that put was stored."""


class WatchGapError(TransferQueueError):
    """The changes since a watcher's version are no longer known; it must start again from version 0."""


class QueueUnavailableError(TransferQueueError):
    """The controller or a storage unit is gone."""


class QueueNotInitializedError(QueueUnavailableError, AssertionError):
    """No table was created, or this process has no connection to it."""


class NotOwnerError(TransferQueueError, RuntimeError):
    """The call is left to the process that created the table."""


class TableCheckpointError(TransferQueueError, CheckpointError):
    """A checkpoint of the table cannot be written, or is damaged."""


class IncompleteCheckpointError(TableCheckpointError, FileNotFoundError):
    """A folder is no whole checkpoint of a table: files are missing."""
