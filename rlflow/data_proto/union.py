"""Joining batches: of the same rows (union), and row after row (concat)."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tensordict import TensorDict

from rlflow.data_proto.rules import DataProtoError
from rlflow.utils import tensordict_utils as tu

if TYPE_CHECKING:
    from rlflow.data_proto.proto import DataProto

METRICS = "metrics"


def same_value(first: Any, second: Any) -> bool:
    """Deep equality with NaN equal to NaN; numbers are compared by value, so that 1 equals 1.0."""
    if isinstance(first, numbers.Number) and isinstance(second, numbers.Number) and first == second:
        return True
    return tu.values_equal(first, second)


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the tensors of the second to the first, in place; returns the first.

    Raises:
        DataProtoError: the numbers of rows differ, or a name is in both with different values. Nothing is changed then.
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise DataProtoError(
            f"cannot unite a batch of {list(tensor_dict1.batch_size)} rows ({sorted(map(str, tensor_dict1.keys()))}) "
            f"and one of {list(tensor_dict2.batch_size)} ({sorted(map(str, tensor_dict2.keys()))})"
        )
    refuse_conflicts("batch", dict(tensor_dict1.items()), dict(tensor_dict2.items()))
    return tu.union_tensor_dict(tensor_dict1, tensor_dict2)


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add the arrays of the second to the first, in place; returns the first.

    Raises:
        DataProtoError: a name is in both with different values (NaN equals NaN). Nothing is changed then.
    """
    refuse_conflicts("non_tensor_batch", tensor_dict1, tensor_dict2)
    tensor_dict1.update(tensor_dict2)
    return tensor_dict1


def refuse_conflicts(where: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """`DataProtoError` naming what is in both with different values."""
    conflicts = sorted(str(key) for key in second if key in first and not same_value(first[key], second[key]))
    if conflicts:
        raise DataProtoError(
            f"{where}: {', '.join(conflicts)} in both batches with different values; rename or pop one of them"
        )


def unite(first: DataProto, second: DataProto) -> None:
    """Add everything of `second` to `first`, or nothing when something does not fit."""
    sizes = {len(part) for part in (first, second) if part.batch is not None or part.non_tensor_batch}
    if len(sizes) > 1:
        raise DataProtoError(
            f"cannot unite {len(first)} rows ({_names(first)}) and {len(second)} rows ({_names(second)})"
        )
    for where in ("non_tensor_batch", "meta_info"):
        refuse_conflicts(where, getattr(first, where), getattr(second, where))
    if first.batch is None:
        first.batch = None if second.batch is None else second.batch.copy()
    elif second.batch is not None:
        union_tensor_dict(first.batch, second.batch)
    first.non_tensor_batch.update(second.non_tensor_batch)
    first.meta_info.update(second.meta_info)


def concat_columns(parts: Sequence[DataProto]) -> tuple[TensorDict | None, dict[str, np.ndarray]]:
    """The tensors and arrays of all parts, row after row.

    Raises:
        DataProtoError: a name that one part has and another has not, or rows of different shape.
    """
    first = parts[0]
    for i, part in enumerate(parts[1:], start=1):
        if (odd := _all_names(part) ^ _all_names(first)) or (part.batch is None) != (first.batch is None):
            raise DataProtoError(
                f"batch {i} ({len(part)} rows) and batch 0 ({len(first)} rows) differ in {sorted(odd) or 'batch'}; "
                "rows can only be joined when both have them"
            )
    batches = [part.batch for part in parts if part.batch is not None]
    batch = tu.concat_tensordict(batches) if batches else None
    arrays = {}
    for name in first.non_tensor_batch:
        columns = [part.non_tensor_batch[name] for part in parts]
        if len({column.shape[1:] for column in columns}) > 1:
            raise DataProtoError(f"{name} has shapes {[column.shape for column in columns]} in batches to be joined")
        arrays[name] = np.concatenate(columns)
    return batch, arrays


def concat_meta(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One `meta_info` of those of several parts.

    A value that several parts have must be equal in them. `metrics` are gathered: dicts, or lists of dicts, become one
    dict of lists; None is skipped.

    Raises:
        DataProtoError: values that differ.
    """
    merged: dict[str, Any] = {}
    gathered: list[Mapping[str, Any]] = []
    for i, info in enumerate(infos):
        for key, value in info.items():
            if key == METRICS:
                gathered += [] if value is None else value if isinstance(value, list) else [value]
            elif key in merged and not same_value(merged[key], value):
                raise DataProtoError(
                    f"meta_info[{key!r}] differs between batches to be joined: {merged[key]!r} before batch {i}, "
                    f"{value!r} in it. Values that differ by worker go into meta_info['metrics'] or an array per row."
                )
            else:
                merged.setdefault(key, value)
    return {**merged, METRICS: list_of_dict_to_dict_of_list(gathered)} if gathered else merged


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """`[{"a": 1}, {"a": 2, "b": 3}]` -> `{"a": [1, 2], "b": [3]}`."""
    output: dict[str, list[Any]] = {}
    for entry in list_of_dict:
        for key, value in entry.items():
            output.setdefault(key, []).append(value)
    return output


def _all_names(part: DataProto) -> set[str]:
    return {str(key) for key in (part.batch.keys() if part.batch is not None else ())} | set(part.non_tensor_batch)


def _names(part: DataProto) -> str:
    return ", ".join(sorted(_all_names(part)))
