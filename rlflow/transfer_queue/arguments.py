"""Checks of what callers pass; the messages name what was passed and what is expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlflow.transfer_queue.errors import QueueArgumentError, QueueRequestError, QueueTypeError
from rlflow.transfer_queue.table import Tag, some


def check_keys(keys: Sequence[str] | str) -> list[str]:
    """Keys as a list; a ValueError for none, a TypeError for a key that is no string."""
    result = [keys] if isinstance(keys, str) else list(keys)
    if not result:
        raise QueueArgumentError("the list of keys is empty; name at least one row")
    for key in result:
        if not isinstance(key, str):
            raise QueueTypeError(f"a key is a string, got {key!r} of type {type(key).__name__}")
    return result


def check_tags(tags: Sequence[Tag], size: int) -> list[Tag]:
    """Tags as a list of `size` dicts."""
    result = list(tags)
    if len(result) != size:
        raise QueueArgumentError(f"{len(result)} tags for {size} keys; each row needs one dict, {{}} for no change")
    for tag in result:
        if not isinstance(tag, dict):
            raise QueueTypeError(f"a tag is a dict, got {tag!r} of type {type(tag).__name__}")
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
