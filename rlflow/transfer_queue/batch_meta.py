"""`BatchMeta`: a batch by row numbers and columns, with the schema of each field.

`KVBatchMeta` is what the trainer uses; this is the columnar form, for callers that need dtypes, shapes and readiness
without fetching data.

Invariants
    - `global_indexes`, `partition_ids`, `production_status` (1 = ready), `custom_meta` and `_custom_backend_meta` have
      one entry a row, and so has `per_sample_shapes` of each nested field; every operation keeps them together.
    - Operations return new objects, except `reorder`, `add_fields` and the `*_extra_info` / `*_custom_meta` setters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlflow.transfer_queue.column import OBJECT
from rlflow.transfer_queue.errors import MissingFieldError, QueueArgumentError
from rlflow.transfer_queue.meta import check_permutation, chunk_bounds, copy_plain, merge_extra_info
from rlflow.transfer_queue.schema import (
    FieldSchema,
    extract_field_schema,
    filled_shapes,
    join_schema,
    make_schema,
    per_row,
)


@dataclass(frozen=True, slots=True)
class SampleView:
    """One row of a `BatchMeta`, read-only."""

    global_index: int
    partition_id: str
    fields: dict[str, FieldSchema]
    is_ready: bool
    custom_meta: dict[str, Any]
    production_status: int


class BatchMeta:
    """Rows of the table by their numbers.

    Args:
        global_indexes: row numbers.
        partition_ids: partition of each row.
        field_schema: per field `{dtype, shape, is_nested, is_non_tensor[, per_sample_shapes]}`.
        production_status: int8 per row, 1 = ready; default all 0.
        extra_info: entries of the whole batch.
        custom_meta: tag of each row.
        _custom_backend_meta: per row {field: what the storage backend wants to know}.

    Raises:
        QueueArgumentError: (a ValueError) lengths that differ.
    """

    __slots__ = (
        "_custom_backend_meta",
        "custom_meta",
        "extra_info",
        "field_schema",
        "global_indexes",
        "partition_ids",
        "production_status",
    )

    def __init__(
        self,
        global_indexes: Sequence[int] = (),
        partition_ids: Sequence[str] = (),
        field_schema: dict[str, FieldSchema] | None = None,
        production_status: Any = None,
        extra_info: dict[str, Any] | None = None,
        custom_meta: Sequence[dict[str, Any]] | None = None,
        _custom_backend_meta: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        self.global_indexes = [int(index) for index in global_indexes]
        size = len(self.global_indexes)
        self.partition_ids = list(partition_ids)
        self.field_schema = {name: dict(schema) for name, schema in (field_schema or {}).items()}
        status = np.zeros(size, np.int8) if production_status is None else production_status
        self.production_status = np.array(status, dtype=np.int8)
        self.extra_info = dict(extra_info or {})
        self.custom_meta = [{} for _ in range(size)] if custom_meta is None else copy_plain(list(custom_meta))
        self._custom_backend_meta = (
            [{} for _ in range(size)] if _custom_backend_meta is None else [dict(meta) for meta in _custom_backend_meta]
        )
        lengths = {
            "partition_ids": len(self.partition_ids),
            "production_status": len(self.production_status),
            "custom_meta": len(self.custom_meta),
            "_custom_backend_meta": len(self._custom_backend_meta),
        }
        for name, schema in self.field_schema.items():
            if schema.get("per_sample_shapes") is not None:
                lengths[f"per_sample_shapes of {name!r}"] = len(schema["per_sample_shapes"])
        wrong = {name: length for name, length in lengths.items() if length != size}
        if wrong:
            raise QueueArgumentError(f"a batch of {size} rows needs {size} entries each, got {wrong}")

    # -- reading -----------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.global_indexes)

    def __len__(self) -> int:
        return self.size

    @property
    def field_names(self) -> list[str]:
        """Names of the fields, sorted."""
        return sorted(self.field_schema)

    @property
    def is_ready(self) -> bool:
        """Whether there are rows and all of them are ready."""
        return self.size > 0 and bool(self.production_status.all())

    @property
    def samples(self) -> list[SampleView]:
        """A read-only view of each row, made on demand."""
        shapes = {name: per_row(schema, self.size) for name, schema in self.field_schema.items()}
        return [
            SampleView(
                global_index=index,
                partition_id=self.partition_ids[i],
                fields={
                    name: {"dtype": schema["dtype"], "shape": shapes[name][i], "is_non_tensor": schema["is_non_tensor"]}
                    for name, schema in self.field_schema.items()
                },
                is_ready=bool(self.production_status[i]),
                custom_meta=copy_plain(self.custom_meta[i]),
                production_status=int(self.production_status[i]),
            )
            for i, index in enumerate(self.global_indexes)
        ]

    def _schema_of(self, name: str) -> FieldSchema:
        if name not in self.field_schema:
            raise MissingFieldError(f"this batch has no field {name!r}; it has {self.field_names}")
        return self.field_schema[name]

    def get_dtypes(self, field_name: str) -> list[Any]:
        """Dtype of a field in each row; None for non-tensors."""
        return [self._schema_of(field_name)["dtype"]] * self.size

    def get_shapes(self, field_name: str) -> list[tuple[int, ...] | None]:
        """Shape of a field in each row; None for non-tensors."""
        return per_row(self._schema_of(field_name), self.size)

    # -- batch-level entries and tags --------------------------------------------------------------

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        """One entry of `extra_info`."""
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        """Set one entry of `extra_info`."""
        self.extra_info[key] = value

    def update_extra_info(self, info_dict: dict[str, Any]) -> None:
        """Set several entries of `extra_info`."""
        self.extra_info.update(info_dict)

    def remove_extra_info(self, key: str) -> Any:
        """Remove one entry and return it; None when absent."""
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        """Remove all entries of `extra_info`."""
        self.extra_info.clear()

    def has_extra_info(self, key: str) -> bool:
        """Whether `extra_info` has `key`."""
        return key in self.extra_info

    def get_all_extra_info(self) -> dict[str, Any]:
        """A deep copy of `extra_info`."""
        return copy.deepcopy(self.extra_info)

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        """A deep copy of the tags."""
        return copy_plain(self.custom_meta)

    def update_custom_meta(self, custom_meta: Sequence[dict[str, Any]]) -> None:
        """Merge one dict into the tag of each row."""
        if len(custom_meta) != self.size:
            raise QueueArgumentError(
                f"{len(custom_meta)} tags for {self.size} rows; give one dict a row, {{}} for no change"
            )
        self.custom_meta = [{**old, **copy_plain(new)} for old, new in zip(self.custom_meta, custom_meta, strict=True)]

    def clear_custom_meta(self) -> None:
        """Empty the tag of every row."""
        self.custom_meta = [{} for _ in range(self.size)]

    # -- rows --------------------------------------------------------------------------------------

    def _take(self, rows: Iterable[int]) -> BatchMeta:
        picked = list(rows)
        schema = {}
        for name, old in self.field_schema.items():
            new = dict(old)
            if old.get("per_sample_shapes") is not None:
                shapes = [old["per_sample_shapes"][i] for i in picked]
                new["per_sample_shapes"] = shapes
                new["shape"] = shapes[0] if shapes and len(set(shapes)) == 1 else None
            schema[name] = new
        return BatchMeta(
            [self.global_indexes[i] for i in picked],
            [self.partition_ids[i] for i in picked],
            schema,
            self.production_status[picked] if picked else None,
            copy.deepcopy(self.extra_info),
            [self.custom_meta[i] for i in picked],
            [self._custom_backend_meta[i] for i in picked],
        )

    def select_samples(self, sample_indices: Sequence[int]) -> BatchMeta:
        """The rows at these places, in that order."""
        wrong = [int(i) for i in sample_indices if not 0 <= int(i) < self.size]
        if wrong:
            raise QueueArgumentError(f"rows {wrong[:8]} are out of range for a batch of {self.size}")
        return self._take(int(i) for i in sample_indices)

    def __getitem__(self, item: int | slice) -> BatchMeta:
        if isinstance(item, slice):
            return self._take(range(*item.indices(self.size)))
        place = item + self.size if item < 0 else item
        if not 0 <= place < self.size:
            raise IndexError(f"row {item} is out of range for a batch of {self.size}")
        return self._take([place])

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """Near-equal contiguous parts, longer ones first; late ones may be empty."""
        return [self._take(range(start, stop)) for start, stop in chunk_bounds(self.size, chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """One part a partition, in the order of first occurrence."""
        rows: dict[str, list[int]] = {}
        for i, partition in enumerate(self.partition_ids):
            rows.setdefault(partition, []).append(i)
        return [self._take(places) for places in rows.values()]

    def reorder(self, indices: Sequence[int]) -> None:
        """Put row `indices[i]` at place i, in place. ValueError unless every row occurs once."""
        moved = self._take(check_permutation(indices, self.size))
        for slot in self.__slots__:
            if slot != "extra_info":
                setattr(self, slot, getattr(moved, slot))

    # -- columns -----------------------------------------------------------------------------------

    def select_fields(self, field_names: Iterable[str]) -> BatchMeta:
        """The same rows with these fields; unknown names are ignored."""
        wanted = set(field_names)
        result = self.copy()
        result.field_schema = {name: schema for name, schema in result.field_schema.items() if name in wanted}
        result._custom_backend_meta = [
            {name: value for name, value in meta.items() if name in wanted} for meta in result._custom_backend_meta
        ]
        return result

    def add_fields(self, tensor_dict: Any, set_all_ready: bool = True) -> BatchMeta:
        """Add the fields of a TensorDict with as many rows; returns self.

        Args:
            tensor_dict: TensorDict of batch size [N].
            set_all_ready: mark every row as ready.
        """
        schema = extract_field_schema(tensor_dict)
        if int(tensor_dict.batch_size[0]) != self.size:
            raise QueueArgumentError(f"the data has {int(tensor_dict.batch_size[0])} rows, the batch {self.size}")
        self.field_schema.update(schema)
        if set_all_ready:
            self.production_status = np.ones(self.size, np.int8)
        return self

    def union(self, other: BatchMeta) -> BatchMeta:
        """The same rows with the fields, tags and entries of both; `other` wins. A row is ready if it is in both."""
        if self.global_indexes != other.global_indexes or self.partition_ids != other.partition_ids:
            raise QueueArgumentError("union needs the same rows in the same order; use select_samples or reorder first")
        result = self.copy()
        result.field_schema.update(other.copy().field_schema)
        result.production_status = self.production_status & other.production_status
        result.extra_info.update(copy.deepcopy(other.extra_info))
        result.update_custom_meta(other.custom_meta)
        result._custom_backend_meta = [
            {**mine, **theirs}
            for mine, theirs in zip(self._custom_backend_meta, other._custom_backend_meta, strict=True)
        ]
        return result

    @classmethod
    def concat(cls, data: Sequence[BatchMeta], validate: bool = True) -> BatchMeta:
        """Join parts in order; empty parts add nothing.

        Raises:
            QueueArgumentError: (a ValueError, with `validate`) parts of different fields or dtypes; always when
                `extra_info` of one key holds two values.
        """
        parts = [part for part in data if part.size] or list(data[:1])
        if not parts:
            return cls()
        if validate:
            _check_same_fields(parts)
        common = [name for name in parts[0].field_schema if all(name in part.field_schema for part in parts)]
        return cls(
            [index for part in parts for index in part.global_indexes],
            [partition for part in parts for partition in part.partition_ids],
            {
                name: join_schema([part.field_schema[name] for part in parts], [part.size for part in parts])
                for name in common
            },
            np.concatenate([part.production_status for part in parts]),
            merge_extra_info(part.extra_info for part in parts),
            [tag for part in parts for tag in part.custom_meta],
            [meta for part in parts for meta in part._custom_backend_meta],
        )

    def copy(self) -> BatchMeta:
        """An independent copy."""
        return self._take(range(self.size))

    @classmethod
    def empty(cls, extra_info: dict[str, Any] | None = None) -> BatchMeta:
        """A batch without rows."""
        return cls(extra_info=extra_info)

    # -- plumbing ----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {slot: getattr(self, slot) for slot in self.__slots__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for slot, value in state.items():
            setattr(self, slot, value)
        # Ray hands out arrays as read-only views of its shared memory; rows become ready later, so this one is written.
        self.production_status = np.array(self.production_status, dtype=np.int8)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchMeta):
            return NotImplemented
        mine, theirs = self.__getstate__(), other.__getstate__()
        status, their_status = mine.pop("production_status"), theirs.pop("production_status")
        return bool(np.array_equal(status, their_status)) and mine == theirs

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"BatchMeta(size={self.size}, partitions={sorted(set(self.partition_ids))}, fields={self.field_names}, "
            f"ready={int(self.production_status.sum())})"
        )


def _check_same_fields(parts: Sequence[BatchMeta]) -> None:
    first = parts[0]
    for part in parts[1:]:
        if part.field_schema.keys() != first.field_schema.keys():
            raise QueueArgumentError(f"cannot join batches of fields {first.field_names} and {part.field_names}")
        for name, schema in part.field_schema.items():
            if schema["dtype"] != first.field_schema[name]["dtype"]:
                raise QueueArgumentError(
                    f"cannot join field {name!r} of dtypes {first.field_schema[name]['dtype']} and {schema['dtype']}"
                )


def meta_of(reply: dict[str, Any], partition_id: str) -> BatchMeta:
    """The meta of rows that the controller described (`RowNumbers.describe`)."""
    import torch

    schema = {}
    for name, (dtype, shapes) in reply["fields"].items():
        if dtype == OBJECT:
            schema[name] = make_schema(None, [None] * len(shapes))
        else:
            rows = filled_shapes([None if shape is None else (shape or (1,)) for shape in shapes])
            schema[name] = make_schema(getattr(torch, dtype) if dtype else None, rows)
    count = len(reply["indexes"])
    return BatchMeta(reply["indexes"], [partition_id] * count, schema, reply["ready"], None, reply["tags"])
