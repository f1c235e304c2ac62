"""Tags on their way between client and controller: one msgpack message for the tags of a whole call.

Rows of a batch mostly have the same tag names, so tags travel and are kept as one tuple of names that rows share and
one tuple of values a row. Message: [rows, [[names, row numbers or nil for all, [column of values, ...]], ...]], one
entry for each set of names.

Values are plain: str, int, float, bool, None, bytes, lists, tuples and dicts of these, and numpy scalars.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from sys import intern
from typing import Any

from rlflow.transfer_queue.errors import QueueArgumentError, QueueTypeError
from rlflow.transfer_queue.meta import copy_plain
from rlflow.transfer_queue.objects import pack_plain, unpack

Tag = dict[str, Any]
Names = tuple[str, ...]
Values = tuple[Any, ...]

# Set by the table on rows that lost fields with a storage unit: the sorted names of these fields.
LOST = "tq_lost"

_FLAT = frozenset((str, int, float, bool, type(None), bytes))
# A longer string is rarely the same in many rows, so sharing it saves nothing.
_SHARED_LENGTH = 16


@dataclass(slots=True)
class TagBatch:
    """The tags of some rows: the tag of row i is `dict(zip(names[i], values[i]))`."""

    names: list[Names]
    values: list[Values]

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def of(cls, tags: Sequence[Tag]) -> TagBatch:
        """From one dict a row."""
        first = tuple(tags[0]) if tags else ()
        if first and all(map(len(first).__eq__, map(len, tags))):
            try:
                pick = map(itemgetter(*first), tags)
                return cls([shared_names(first)] * len(tags), list(zip(pick, strict=True) if len(first) == 1 else pick))
            except KeyError:
                pass  # as many names, but others
        return cls([shared_names(tuple(tag)) for tag in tags], [tuple(tag.values()) for tag in tags])

    def dicts(self) -> list[Tag]:
        """One new dict a row."""
        return list(map(dict, map(zip, self.names, self.values)))


@lru_cache(maxsize=4096)
def shared_names(names: Names) -> Names:
    """The same tuple for equal names, so that rows share it."""
    return names


@lru_cache(maxsize=4096)
def _merge_plan(old: Names, new: Names) -> tuple[Names, itemgetter[Any]]:
    merged = {name: place for place, name in enumerate(old)}
    merged.update({name: len(old) + place for place, name in enumerate(new)})
    return shared_names(tuple(merged)), itemgetter(*merged.values())


def merge(old: Names, old_values: Values, new: Names, new_values: Values) -> tuple[Names, Values]:
    """What `dict.update` makes of two tags."""
    if not old or old == new:
        return new, new_values
    if not new:
        return old, old_values
    names, pick = _merge_plan(old, new)
    # Two tags that differ in their names have two names or more together, so `pick` yields a tuple.
    return names, pick(old_values + new_values)


# -- messages --------------------------------------------------------------------------------------


def pack_batch(batch: TagBatch) -> bytes:
    """The message of a batch; `QueueTypeError` for a value that is not plain."""
    size, first = len(batch), batch.names[0] if batch.names else ()
    if all(names is first for names in batch.names):
        return pack_plain([size, [[list(first), None, _columns(batch.values)]] if first else []])
    groups: dict[Names, list[int]] = {}
    for row, names in enumerate(batch.names):
        if names:
            groups.setdefault(names, []).append(row)
    parts = [[list(names), rows, _columns([batch.values[row] for row in rows])] for names, rows in groups.items()]
    return pack_plain([size, parts])


def _columns(values: Sequence[Values]) -> list[list[Any]]:
    return list(map(list, zip(*values, strict=True)))


def unpack_batch(data: bytes) -> TagBatch:
    """Inverse of `pack_batch`."""
    size, parts = unpack(data)
    names: list[Names] = [()] * size
    values: list[Values] = [()] * size
    for group, rows, columns in parts:
        shared = shared_names(tuple(group))
        group_values = list(zip(*map(_deduplicated, columns), strict=True))
        if rows is None:
            return TagBatch([shared] * size, group_values)
        for row, row_values in zip(rows, group_values, strict=True):
            names[row], values[row] = shared, row_values
    return TagBatch(names, values)


def _deduplicated(column: list[Any]) -> list[Any]:
    """Equal short strings as one object: a status occurs in all rows of a table."""
    if type(column[0]) is not str or len(column[0]) > _SHARED_LENGTH:
        return column
    try:
        return list(map(intern, column))
    except TypeError:  # not all of them are strings
        return column


@dataclass(slots=True)
class TaggedKeys:
    """Keys and their tags, as a controller's reply."""

    keys: list[str]
    packed: bytes

    @classmethod
    def of(cls, keys: list[str], names: list[Names], values: list[Values]) -> TaggedKeys:
        """From the keys, tag names and tag values of some rows."""
        return cls(keys, pack_batch(TagBatch(names, values)))

    def dicts(self) -> dict[str, Tag]:
        """{key: tag}, in order."""
        return dict(zip(self.keys, unpack_batch(self.packed).dicts(), strict=True))


# -- what a caller gives ---------------------------------------------------------------------------


def check_tags(tags: Iterable[Tag], size: int) -> list[Tag]:
    """Tags as a list of `size` dicts."""
    result = list(tags)
    if len(result) != size:
        raise QueueArgumentError(f"{len(result)} tags for {size} keys; each row needs one dict, {{}} for no change")
    if set(map(type, result)) != {dict}:
        for tag in result:
            if not isinstance(tag, dict):
                raise QueueTypeError(f"a tag is a dict, got {tag!r} of type {type(tag).__name__}")
    return result


def check_names(batch: TagBatch) -> None:
    """Raise for a tag name that is no string, or reserved."""
    for names in {id(names): names for names in batch.names}.values():
        for name in names:
            if not isinstance(name, str):
                raise QueueTypeError(f"a tag entry is named by a string, got {name!r} of type {type(name).__name__}")
        if LOST in names:
            raise QueueArgumentError(
                f"the tag entry {LOST!r} is set by the table alone (fields lost with their storage)"
            )


def pack_tags(tags: Sequence[Tag], keys: Sequence[str]) -> bytes:
    """Tags as a message; `QueueTypeError` names key and entry of a value that is not plain."""
    batch = TagBatch.of(tags)
    check_names(batch)
    try:
        return pack_batch(batch)
    except QueueTypeError:
        for key, tag in zip(keys, tags, strict=True):
            for name, value in tag.items():
                try:
                    pack_plain(value)
                except QueueTypeError as error:
                    raise QueueTypeError(f"tag entry {name!r} of key {key!r}: {error}") from None
        raise


def copy_tags(tags: Sequence[Tag]) -> list[Tag]:
    """Deep copies of plain tags, at the price of shallow ones where that is enough."""
    flat = _FLAT.issuperset(map(type, chain.from_iterable(map(dict.values, tags))))
    return [tag.copy() for tag in tags] if flat else [copy_plain(tag) for tag in tags]
