"""`KVBatchMeta`: which rows a batch consists of. It is what travels between the stages of a step instead of tensors.

Invariants
    - `keys[i]` and `tags[i]` belong to one row; every operation keeps them together.
    - `concat(meta.chunk(n)) == meta` for every n >= 1 (an `extra_info` of None comes back as {}).
    - Parts and copies share no tag and no `extra_info` with their source.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlflow.transfer_queue.errors import QueueArgumentError

_PLAIN = (str, int, float, bool, type(None))


def copy_plain(value: Any) -> Any:
    """Deep copy; dicts and lists of plain values, which tags are made of, without the cost of `copy.deepcopy`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {key: copy_plain(item) for key, item in value.items()}
    if kind is list:
        return [copy_plain(item) for item in value]
    return copy.deepcopy(value)


def same_value(first: Any, second: Any) -> bool:
    """Equality that compares arrays and tensors by dtype, shape and content, also inside dicts and lists."""
    if first is second:
        return True
    if hasattr(first, "shape") or hasattr(second, "shape"):
        if type(first) is not type(second) or first.dtype != second.dtype or tuple(first.shape) != tuple(second.shape):
            return False
        return bool((first == second).all())
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same_value(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(same_value(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second)


def merge_extra_info(infos: Iterable[dict[str, Any] | None]) -> dict[str, Any]:
    """Union of the dicts; `QueueArgumentError` when one key holds two values."""
    merged: dict[str, Any] = {}
    for info in infos:
        for key, value in (info or {}).items():
            if key in merged and not same_value(merged[key], value):
                raise QueueArgumentError(
                    f"extra_info[{key!r}] differs between the parts to concatenate; drop the key or make it equal first"
                )
            merged[key] = value
    return copy_plain(merged)


def chunk_bounds(size: int, parts: int) -> list[tuple[int, int]]:
    """(start, stop) of near-equal contiguous parts, longer ones first; parts may be empty."""
    if parts < 1:
        raise QueueArgumentError(f"cannot cut a batch into {parts} parts; ask for 1 or more")
    share, longer = divmod(size, parts)
    stops = [share * (i + 1) + min(i + 1, longer) for i in range(parts)]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def check_permutation(indexes: Sequence[int], size: int) -> list[int]:
    """The indexes as a list; `QueueArgumentError` unless they name each of `size` rows exactly once."""
    order = [int(index) for index in indexes]
    if sorted(order) != list(range(size)):
        raise QueueArgumentError(
            f"reorder needs each of the row numbers 0..{size - 1} once, got {len(order)} numbers: {order[:8]}"
            f"{'...' if len(order) > 8 else ''}"
        )
    return order


@dataclass
class KVBatchMeta:
    """A batch by its keys.

    Attributes:
        keys: row keys, in batch order, without duplicates.
        tags: one dict a row; missing tags count as empty ones.
        partition_id: the partition of all rows.
        fields: names of the fields that all rows have, where known.
        extra_info: options and results that belong to the whole batch.

    Raises:
        QueueArgumentError: (a ValueError) keys and tags of different length, duplicate keys or fields.
    """

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = list(self.keys)
        if len(self.keys) != len(self.tags):
            raise QueueArgumentError(f"{len(self.keys)} keys but {len(self.tags)} tags; each row needs one dict")
        if len(set(self.keys)) != len(self.keys):
            twice = [key for key, times in Counter(self.keys).items() if times > 1]
            raise QueueArgumentError(f"duplicate keys in a batch: {twice[:8]}; a row may occur once")
        if self.fields is not None:
            self.fields = list(self.fields)
            if len(set(self.fields)) != len(self.fields):
                raise QueueArgumentError(f"duplicate fields in a batch: {self.fields}")
        self.tags = copy_plain(list(self.tags))
        self.extra_info = copy_plain(self.extra_info)
        self._size = len(self.keys)

    @classmethod
    def owning(
        cls, keys: list[str], tags: list[dict[str, Any]], partition_id: str | None, fields: list[str] | None
    ) -> KVBatchMeta:
        """From parts that are known to be valid and that nobody else holds: nothing is checked or copied."""
        meta = cls.__new__(cls)
        meta.keys, meta.tags, meta.partition_id, meta.fields, meta.extra_info = keys, tags, partition_id, fields, {}
        meta._size = len(keys)
        return meta

    @property
    def size(self) -> int:
        """Number of rows, fixed at construction."""
        return self._size

    def __len__(self) -> int:
        return self._size

    def _rows(self, indexes: Iterable[int]) -> KVBatchMeta:
        picked = list(indexes)
        return KVBatchMeta(
            keys=[self.keys[i] for i in picked],
            tags=[self.tags[i] for i in picked],
            partition_id=self.partition_id,
            fields=self.fields,
            extra_info=self.extra_info,
        )

    def select_keys(self, keys_to_select: Sequence[str]) -> KVBatchMeta:
        """These rows, in that order. RuntimeError on an unknown key, ValueError on duplicates."""
        place = {key: i for i, key in enumerate(self.keys)}
        unknown = [key for key in keys_to_select if key not in place]
        if unknown:
            raise RuntimeError(
                f"{len(unknown)} of {len(keys_to_select)} keys are not in this batch of {self.size}: {unknown[:8]}"
            )
        return self._rows(place[key] for key in keys_to_select)

    def reorder(self, indexes: Sequence[int]) -> None:
        """Put row `indexes[i]` at place i, in place. ValueError unless every row occurs once."""
        order = check_permutation(indexes, self.size)
        self.keys = [self.keys[i] for i in order]
        self.tags = [self.tags[i] for i in order]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Cut into `chunks` near-equal contiguous parts; earlier parts are longer, late ones may be empty."""
        return [self._rows(range(start, stop)) for start, stop in chunk_bounds(self.size, chunks)]

    @classmethod
    def concat(cls, data: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """Join parts in order.

        Empty parts add nothing. Equal `extra_info` keys must hold equal values (arrays and tensors by content).

        Raises:
            QueueArgumentError: (a ValueError) parts of different partitions or field sets, a key in two parts, or
                contradicting `extra_info`.
        """
        parts = [part for part in data if part.size] or list(data[:1])
        if not parts:
            return cls()
        first = parts[0]
        for part in parts[1:]:
            if part.partition_id != first.partition_id:
                raise QueueArgumentError(
                    f"cannot join rows of partitions {first.partition_id!r} and {part.partition_id!r} into one batch"
                )
            if (None if part.fields is None else set(part.fields)) != (
                None if first.fields is None else set(first.fields)
            ):
                raise QueueArgumentError(
                    f"cannot join batches of different fields: {first.fields} and {part.fields}; select the common ones"
                )
        return cls(
            keys=[key for part in parts for key in part.keys],
            tags=[tag for part in parts for tag in part.tags],
            partition_id=first.partition_id,
            fields=first.fields,
            extra_info=merge_extra_info(part.extra_info for part in parts),
        )
