"""What a `DataProto` may hold, and the error when it holds something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensordict import TensorDict, TensorDictBase

from rlflow.utils.errors import ContractError


class DataProtoError(ContractError, AssertionError):
    """The parts of a batch do not fit. An `AssertionError` too, which code for the older surface expects."""


def object_array(values: Sequence[Any]) -> np.ndarray:
    """A one-dimensional array of dtype object, one value an entry, whatever the values are."""
    # np.array(values, dtype=object) would make two dimensions of lists of one length.
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def as_column(name: str, value: Any) -> np.ndarray:
    """An array as it is, a list or tuple as `object_array`.

    Raises:
        DataProtoError: another type.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, (list, tuple)):
        return object_array(value)
    raise DataProtoError(
        f"non_tensor_batch[{name!r}] is a {type(value).__name__}; give a numpy array or a list with one value per row. "
        "One value for the whole batch goes into meta_info."
    )


def check_rows(batch: TensorDictBase | None, arrays: Mapping[str, np.ndarray]) -> None:
    """That everything has one number of rows.

    Raises:
        DataProtoError: lengths that differ (the message names them all), a batch without a row dimension or with
            several, or a value of another type.
    """
    if batch is not None:
        if not isinstance(batch, TensorDictBase):
            raise DataProtoError(f"batch must be a TensorDict or None, got a {type(batch).__name__}; see from_dict")
        if len(batch.batch_size) != 1:
            raise DataProtoError(
                f"batch has batch_size {list(batch.batch_size)}; a DataProto has one row dimension. Values without "
                "rows go into meta_info."
            )
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or not array.ndim:
            raise DataProtoError(
                f"non_tensor_batch[{name!r}] is a {type(array).__name__}, which has no rows; make it an array, by "
                "object_array(list) or by DataProto.from_dict(non_tensors=...)"
            )
    sizes = {f"non_tensor_batch[{name!r}]": len(array) for name, array in arrays.items()}
    if batch is not None:
        sizes = {f"batch (with {', '.join(map(str, batch.keys())) or 'no keys'})": int(batch.batch_size[0]), **sizes}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise DataProtoError(f"the parts of a DataProto must have one number of rows, got {shown}")


def make_batch(tensors: Mapping[str, Any]) -> TensorDict | None:
    """A TensorDict of tensors [N, ...]; None of none.

    Raises:
        DataProtoError: leading dimensions that differ, or something that is no tensor with rows.
    """
    import torch

    if not tensors:
        return None
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor) or not value.dim():
            raise DataProtoError(f"{name} is a {_kind(value)}; tensors of a batch have rows, [N, ...]")
    sizes = {name: int(value.shape[0]) for name, value in tensors.items()}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise DataProtoError(f"the tensors of a batch must have one number of rows, got {shown}")
    batch = TensorDict({}, batch_size=[next(iter(sizes.values()))])
    for name, value in tensors.items():
        batch.set(name, value)
    return batch


def _kind(value: Any) -> str:
    return "scalar tensor" if hasattr(value, "dim") else type(value).__name__
