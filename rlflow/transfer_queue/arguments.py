"""Checks of what callers pass; the messages name what was passed and what is expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlflow.transfer_queue.errors import QueueArgumentError, QueueRequestError, QueueTypeError, some


def check_keys(keys: Sequence[str] | str) -> list[str]:
    """Keys as a list; a ValueError for none, a TypeError for a key that is no string."""
    result = [keys] if isinstance(keys, str) else list(keys)
    if not result:
        raise QueueArgumentError("the list of keys is empty; name at least one row")
    if set(map(type, result)) != {str}:
        for key in result:
            if not isinstance(key, str):
                raise QueueTypeError(f"a key is a string, got {key!r} of type {type(key).__name__}")
    return result


def check_select(select_fields: Any, missing_ok: Sequence[str]) -> list[str] | None:
    """Selected fields as a list, None for all; optional fields must be among the selected ones."""
    if isinstance(missing_ok, str):
        raise QueueTypeError(f"missing_ok takes a list of field names, got the string {missing_ok!r}")
    if select_fields is None:
        return None
    selected = [select_fields] if isinstance(select_fields, str) else list(select_fields)
    surplus = [name for name in missing_ok if name not in selected]
    if surplus:
        raise QueueArgumentError(
            f"missing_ok names {some(surplus)}, which select_fields does not select; add the optional fields to it"
        )
    return selected


def check_partition(partition_id: Any) -> None:
    """A TypeError unless it can name a partition."""
    if not isinstance(partition_id, str) or not partition_id:
        raise QueueTypeError(f"a partition is named by a non-empty string, got {partition_id!r}")


def check_fields(fields: Any) -> list[str]:
    """Field names as a list; a TypeError for a single string, whose letters would be taken for names."""
    if isinstance(fields, str):
        raise QueueTypeError(f"data_fields takes a list of field names, got the string {fields!r}")
    return list(fields)


def check_size(batch_size: int, least: int) -> int:
    """The batch size; a ValueError (and RuntimeError) when it is below `least`."""
    if int(batch_size) < least:
        raise QueueRequestError(f"batch_size={batch_size} asks for no rows; ask for {least} or more")
    return int(batch_size)


def check_rows(data: Any) -> int:
    """Number of rows of a TensorDict; a TypeError for anything else, a ValueError (and RuntimeError) for no rows."""
    size = getattr(data, "batch_size", None)
    if size is None:
        raise QueueTypeError(f"put takes a TensorDict, got {type(data).__name__}")
    if not len(size) or not int(size[0]):
        raise QueueRequestError(f"put got a TensorDict of batch size {tuple(size)}, which has no rows to write")
    return int(size[0])
