"""Building a batch and reading its values; part of `rlflow.utils.tensordict_utils`, which says what a batch is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from rlflow.utils.errors import ContractError
from rlflow.utils.nested import check_jagged, compact, nested_from_list

_MISSING = object()


def is_batched(data: TensorDict) -> bool:
    """Whether `data` has rows; false for a batch of options or metrics only."""
    return len(data.batch_size) > 0


def make_stack(values: Iterable[Any]) -> NonTensorStack:
    """One Python object per row, each stored as it is (also lists, dicts and None)."""
    items = [NonTensorData(value) for value in values]
    return NonTensorStack(*items) if items else NonTensorStack(batch_size=[0])


def unwrap_non_tensor_data(value: Any) -> Any:
    """NonTensorStack -> list, NonTensorData -> its object, anything else unchanged."""
    if isinstance(value, NonTensorStack):
        return [unwrap_non_tensor_data(item) for item in value.tensordicts]
    if isinstance(value, NonTensorData):
        return value.data
    return value


def get_tensordict(
    tensor_dict: Mapping[str, Any], non_tensor_dict: Mapping[str, Any] | None = None, *, device: Any = None
) -> TensorDict:
    """Build a batch.

    Args:
        tensor_dict: batched values. Tensors are kept (nested ones must be jagged); lists, object arrays and
            NonTensorStacks become one object per row; NonTensorData is taken as belonging to the whole batch.
        non_tensor_dict: one object each for the whole batch.
        device: device of the batch, None to leave tensors where they are.

    Raises:
        ContractError: a value of another type, lengths that differ, or a name in both arguments.
    """
    rows: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    for key, value in tensor_dict.items():
        if isinstance(value, NonTensorData):
            whole[key] = value.data
        else:
            rows[key] = _as_row_value(key, value)
    both = sorted(set(tensor_dict) & set(non_tensor_dict or {}))
    if both:
        raise ContractError(f"{both} are given both per row and for the whole batch; a name has one meaning in a batch")
    whole.update(non_tensor_dict or {})
    sizes = {key: _n_rows(value) for key, value in rows.items()}
    if len(set(sizes.values())) > 1:
        raise ContractError(f"the values of a batch must have one length, got {sizes}")
    batch = TensorDict({}, batch_size=[next(iter(sizes.values()))] if sizes else [], device=device)
    for key, value in rows.items():
        batch.set(key, value)
    return assign_non_tensor_whole(batch, whole)


def _as_row_value(key: str, value: Any) -> Tensor | NonTensorStack:
    if isinstance(value, Tensor):
        if value.is_nested:
            return compact(check_jagged(value, key))
        if value.dim() == 0:
            raise ContractError(f"{key} is a scalar tensor without a row dimension; pass it in non_tensor_dict")
        return value
    if isinstance(value, NonTensorStack):
        return value
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(value) if value.dtype.kind in "biuf" else make_stack(value.tolist())
    if isinstance(value, (list, tuple, np.ndarray)):
        if len(value) and all(isinstance(item, Tensor) for item in value):
            raise ContractError(
                f"{key} is a list of tensors; use torch.stack or nested_from_list, so that it stays one"
            )
        return make_stack(value)
    raise ContractError(
        f"{key} is a {type(value).__name__}; a batch takes tensors and lists per row. One value for the whole batch "
        "goes into non_tensor_dict."
    )


def _n_rows(value: Any) -> int:
    return value.batch_size[0] if isinstance(value, NonTensorStack) else value.shape[0]


def assign_non_tensor_data(data: TensorDict, key: str, value: Any) -> TensorDict:
    """Set one object for the whole batch, in place; returns `data`."""
    value = value.data if isinstance(value, NonTensorData) else value
    data.set(key, NonTensorData(value, batch_size=data.batch_size))  # type: ignore[arg-type]
    return data


def assign_non_tensor_stack(data: TensorDict, key: str, values: Sequence[Any]) -> TensorDict:
    """Set one object per row, in place; returns `data`. `ContractError` when the number of rows differs."""
    if not is_batched(data) or len(values) != data.batch_size[0]:
        raise ContractError(f"{key} has {len(values)} values for a batch of size {list(data.batch_size)}")
    data.set(key, make_stack(values))
    return data


def assign_non_tensor(data: TensorDict, **values: Any) -> TensorDict:
    """Set several: a list is one object per row, anything else one object for the batch. In place; returns `data`."""
    for key, value in values.items():
        if isinstance(value, (list, NonTensorStack)):
            assign_non_tensor_stack(data, key, unwrap_non_tensor_data(value))
        else:
            assign_non_tensor_data(data, key, value)
    return data


def assign_non_tensor_whole(data: TensorDict, values: Mapping[str, Any]) -> TensorDict:
    """Set one object for the whole batch under each name (lists too), in place; returns `data`."""
    for key, value in values.items():
        assign_non_tensor_data(data, key, value)
    return data


def list_of_dict_to_tensordict(rows: Sequence[Mapping[str, Any]]) -> TensorDict:
    """One mapping per row -> one batch over the union of their keys.

    Tensors of one shape are stacked dense, others become jagged; everything else becomes one object per row.

    Raises:
        ContractError: no rows, or a row lacks a key that another has (the message names both).
    """
    if not rows:
        raise ContractError("no rows to build a batch from")
    keys = list(dict.fromkeys(key for row in rows for key in row))
    for i, row in enumerate(rows):
        missing = [key for key in keys if key not in row]
        if missing:
            raise ContractError(
                f"row {i} lacks {missing}, which other rows have. Give every row every field, None for no object."
            )
    columns: dict[str, Any] = {}
    for key in keys:
        values = [row[key] for row in rows]
        if all(isinstance(value, Tensor) for value in values):
            same = len({tuple(value.shape) for value in values}) == 1
            columns[key] = torch.stack(values) if same else nested_from_list(values)
        else:
            columns[key] = make_stack(values)
    return get_tensordict(columns)


def get(data: TensorDict, key: str, default: Any = None) -> Any:
    """A tensor as it is, one object per row as a list, one object for the batch as itself; `default` when absent."""
    value = data.get(key, _MISSING)
    return default if value is _MISSING else unwrap_non_tensor_data(value)


def get_non_tensor_data(data: TensorDict, key: str, default: Any = None) -> Any:
    """`get` under the reference's name for options of a batch."""
    return get(data, key, default)


def pop(data: TensorDict, key: str, default: Any = None) -> Any:
    """`get`, and remove the key from `data`."""
    value = get(data, key, default)
    if key in data.keys():
        del data[key]
    return value


def get_keys(data: TensorDict, keys: Iterable[str]) -> TensorDict:
    """A new batch with `keys` only, sharing the values. `KeyError` names the missing ones."""
    keys = list(keys)
    missing = [key for key in keys if key not in data.keys()]
    if missing:
        raise KeyError(f"{missing} not in the batch; it has {sorted(data.keys())}")
    out = TensorDict({}, batch_size=data.batch_size, device=data.device)
    for key in keys:
        out.set(key, data.get(key))
    return out


def pop_keys(data: TensorDict, keys: Iterable[str]) -> TensorDict:
    """`get_keys`, and remove them from `data`."""
    keys = list(keys)
    out = get_keys(data, keys)
    for key in keys:
        del data[key]
    return out


def non_tensor_dict(data: TensorDict) -> dict[str, Any]:
    """The objects that belong to the whole batch, by name."""
    return {k: v.data for k, v in data.items() if isinstance(v, NonTensorData) and not isinstance(v, NonTensorStack)}
