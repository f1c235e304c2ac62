"""What `DataProto` does with single columns: choose, rename, and cut them into rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict

from rlflow.data_proto.rules import DataProtoError
from rlflow.utils import tensordict_utils as tu

T = TypeVar("T")


def only(values: Mapping[str, T], keys: Sequence[str] | None) -> dict[str, T]:
    """A dict of those `keys` that are there; None: of all."""
    return dict(values) if keys is None else {key: values[key] for key in keys if key in values}


def rename(batch: TensorDict | None, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> TensorDict | None:
    """The batch with other names in the same order; errors as `DataProto.rename` has them."""
    old, new = _names("old_keys", old_keys), _names("new_keys", new_keys)
    if len(old) != len(new) or len(set(old)) != len(old) or len(set(new)) != len(new):
        raise ValueError(f"old_keys={old} and new_keys={new} must be as many, each name once")
    has = [] if batch is None else [str(key) for key in batch.keys()]
    missing = [key for key in old if key not in has]
    taken = [key for key in new if key in has and key not in old]
    if missing or taken:
        problem = f"{', '.join(missing)} not there" if missing else f"{', '.join(taken)} there already"
        raise DataProtoError(f"cannot rename {old} to {new}: {problem}; the batch has {', '.join(has) or 'no keys'}")
    if batch is None:
        return None
    names = dict(zip(old, new, strict=True))
    out = TensorDict({}, batch_size=batch.batch_size, device=batch.device)
    for key, value in batch.items():
        out.set(names.get(str(key), key), value)
    return out


def _names(what: str, keys: Any) -> list[str]:
    if isinstance(keys, str):
        return [keys]
    if isinstance(keys, (list, tuple)):
        return list(keys)
    raise TypeError(f"{what} must be a string or a list of strings, got a {type(keys).__name__}")


def unfold(
    batch: TensorDict | None, arrays: Mapping[str, np.ndarray], n: int, split_keys: Sequence[str]
) -> tuple[TensorDict | None, dict[str, np.ndarray]]:
    """(batch, arrays) as `DataProto.unfold_column_chunks` makes them."""
    values = {**({} if batch is None else dict(batch.items())), **arrays}
    for key in split_keys:
        value = values.get(key)
        if value is None or tu.is_nested(value) or value.ndim < 2 or n < 1 or value.shape[1] % n:
            shape = "not there" if value is None else "jagged" if tu.is_nested(value) else f"of {tuple(value.shape)}"
            raise DataProtoError(f"{key} is {shape}; it cannot be cut into {n} rows of equal length")

    def cut(value: Any) -> Any:
        return value.reshape(value.shape[0] * n, value.shape[1] // n, *value.shape[2:])

    new_arrays = {k: cut(v) if k in split_keys else np.repeat(v, n, axis=0) for k, v in arrays.items()}
    if batch is None:
        return None, new_arrays
    rows = torch.arange(batch.batch_size[0]).repeat_interleave(n)
    out = tu.index_select_tensor_dict(batch.exclude(*split_keys), rows)
    for key in split_keys:
        if key in batch.keys():
            out.set(key, cut(batch.get(key)))
    return out, new_arrays
