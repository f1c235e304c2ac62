"""Moving rows of a batch: select, cut, join, pad, iterate, compare; part of `rlflow.utils.tensordict_utils`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from rlflow.utils.errors import ContractError
from rlflow.utils.nested import (
    check_jagged,
    concat_nested_tensors,
    nested_from_values,
    nested_index_select,
    nested_lengths,
    nested_narrow,
    nested_values,
    ragged_dim,
)
from rlflow.utils.tensordict_build import is_batched, make_stack, unwrap_non_tensor_data

Index = Tensor | np.ndarray | Sequence[int] | Sequence[bool]


def _map_rows(
    data: TensorDict,
    size: int,
    *,
    dense: Callable[[Tensor], Tensor],
    jagged: Callable[[Tensor], Tensor],
    objects: Callable[[list[Any]], Sequence[Any]],
) -> TensorDict:
    """A batch of `size` rows: each batched value passed through the function of its kind, the others kept."""
    out = TensorDict({}, batch_size=[size], device=data.device)
    for key, value in data.items():
        if isinstance(value, NonTensorStack):
            out.set(key, make_stack(objects(unwrap_non_tensor_data(value))))
        elif isinstance(value, NonTensorData):
            out.set(key, NonTensorData(value.data, batch_size=[size]))
        elif isinstance(value, Tensor):
            out.set(key, jagged(check_jagged(value, key)) if value.is_nested else dense(value))
        else:
            raise ContractError(f"{key} is a {type(value).__name__}; a batch holds tensors and Python objects only")
    return out


def _need_rows(data: TensorDict, verb: str) -> int:
    if not is_batched(data):
        raise ContractError(f"cannot {verb} a batch without rows (it holds {sorted(data.keys())})")
    return data.batch_size[0]


def row_index(index: Index, n: int) -> Tensor:
    """What selects rows of a batch of `n`, as int64 [k] from 0 to n - 1.

    Args:
        index: integers (repeats and negatives allowed), or a bool mask of one entry a row.
        n: rows of the batch.

    Raises:
        ContractError: an index outside the batch, or a mask of another length.
    """
    idx = torch.as_tensor(index)
    if idx.dtype == torch.bool:
        if idx.shape != (n,):
            raise ContractError(f"a mask of shape {tuple(idx.shape)} does not fit a batch of {n} rows")
        idx = idx.nonzero().flatten()
    idx = idx.to(torch.int64).flatten()
    if idx.numel() and (int(idx.min()) < -n or int(idx.max()) >= n):
        raise ContractError(f"row indices {int(idx.min())}..{int(idx.max())} are outside a batch of {n} rows")
    return torch.where(idx < 0, idx + n, idx)


def index_select_tensor_dict(data: TensorDict, index: Index) -> TensorDict:
    """Rows `index` in that order: integers (repeats and negatives allowed) or a bool mask of one entry a row."""
    idx = row_index(index, _need_rows(data, "select rows of"))
    order = idx.tolist()
    return _map_rows(
        data,
        len(order),
        dense=lambda t: t[idx.to(t.device)],
        jagged=lambda t: nested_index_select(t, idx),
        objects=lambda values: [values[i] for i in order],
    )


def slice_tensordict(data: TensorDict, start: int, stop: int) -> TensorDict:
    """Rows [start, stop), sharing memory with `data`."""
    n = _need_rows(data, "slice")
    if not 0 <= start <= stop <= n:
        raise ContractError(f"rows {start}..{stop} are outside a batch of {n} rows")
    return _map_rows(
        data,
        stop - start,
        dense=lambda t: t[start:stop],
        jagged=lambda t: nested_narrow(t, start, stop - start),
        objects=lambda values: values[start:stop],
    )


def chunk_tensordict(data: TensorDict, chunks: int) -> list[TensorDict]:
    """Cut into `chunks` parts of equal size, in order, sharing memory. `ContractError` when they would not be equal."""
    n = _need_rows(data, "split")
    if chunks < 1 or n % chunks:
        raise ContractError(f"a batch of {n} rows cannot be split into {chunks} equal parts; see pad_to_divisor")
    size = n // chunks
    return [slice_tensordict(data, i * size, (i + 1) * size) for i in range(chunks)]


def concat_tensordict(batches: Sequence[TensorDict]) -> TensorDict:
    """Join batches row-wise; they must hold the same names and kinds of values.

    An object for the whole batch is taken from the first. Of batches without rows the first is returned.

    Raises:
        ContractError: no batches, batches with and without rows mixed, or a name that is missing in one or of
            another kind there.
    """
    if not batches:
        raise ContractError("no batches to concatenate")
    first = batches[0]
    if len({is_batched(batch) for batch in batches}) > 1:
        raise ContractError("cannot concatenate batches with rows and batches without")
    if not is_batched(first) or len(batches) == 1:
        return first
    for i, batch in enumerate(batches):
        if set(batch.keys()) != set(first.keys()):
            odd = sorted(set(batch.keys()) ^ set(first.keys()))
            raise ContractError(f"batch {i} and batch 0 differ in {odd}; rows can only be joined when both have them")
    out = TensorDict({}, batch_size=[sum(batch.batch_size[0] for batch in batches)], device=first.device)
    for key in first.keys():
        out.set(key, _concat_values(str(key), [batch.get(key) for batch in batches], out.batch_size[0]))
    return out


def _concat_values(key: str, values: list[Any], size: int) -> Any:
    kinds = {_kind(value) for value in values}
    if len(kinds) > 1:
        raise ContractError(f"{key} is {' and '.join(sorted(kinds))} in batches that are to be joined")
    kind = kinds.pop()
    if kind == "jagged":
        return concat_nested_tensors(values)
    if kind == "dense":
        if len({value.shape[1:] for value in values}) > 1:
            shapes = [tuple(value.shape) for value in values]
            raise ContractError(
                f"{key} has shapes {shapes} in batches that are to be joined; make it jagged, or pad it"
            )
        return torch.cat(values)
    if kind == "object per row":
        return make_stack(item for value in values for item in unwrap_non_tensor_data(value))
    if kind == "object per batch":
        return NonTensorData(values[0].data, batch_size=[size])
    raise ContractError(f"{key} is a {kind}; a batch holds tensors and Python objects only")


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "jagged" if value.is_nested else "dense"
    if isinstance(value, NonTensorStack):
        return "object per row"
    return "object per batch" if isinstance(value, NonTensorData) else type(value).__name__


def union_tensor_dict(first: TensorDict, second: TensorDict) -> TensorDict:
    """Add the values of `second` to `first`, in place; returns `first`. Names in both must hold equal values."""
    if first.batch_size != second.batch_size:
        raise ContractError(f"cannot unite batches of sizes {list(first.batch_size)} and {list(second.batch_size)}")
    for key in second.keys():
        if key in first.keys() and not values_equal(first.get(key), second.get(key)):
            raise ContractError(f"{key} is in both batches with different values")
    for key in second.keys():
        first.set(key, second.get(key))
    return first


def make_iterator(
    data: TensorDict,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[TensorDict]:
    """Mini-batches of `mini_batch_size` rows; each row once an epoch, in an order fixed by `seed`.

    Args:
        data: a batch with rows.
        mini_batch_size: rows a mini-batch; must divide the number of rows.
        epochs: passes over the rows; the order differs between epochs when shuffling.
        seed: seed of the shuffle; None draws one.
        dataloader_kwargs: `{"shuffle": bool}`, default no shuffle.

    Raises:
        ContractError: the size does not divide, or an option that has no meaning here.
    """
    n = _need_rows(data, "iterate over")
    orders = mini_batch_rows(n, mini_batch_size, epochs, seed, dataloader_kwargs)
    return (index_select_tensor_dict(data, rows) for rows in orders)


def mini_batch_rows(
    n: int,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[Tensor]:
    """The rows of each mini-batch that `make_iterator` yields of `n` rows; the same arguments and errors."""
    options = dict(dataloader_kwargs or {})
    shuffle = options.pop("shuffle", False)
    if options:
        raise ContractError(f"dataloader_kwargs {sorted(options)} mean nothing here; only 'shuffle' does")
    if mini_batch_size < 1 or n % mini_batch_size:
        raise ContractError(f"mini_batch_size={mini_batch_size} does not divide a batch of {n} rows")
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)

    def orders() -> Iterator[Tensor]:
        for _ in range(epochs):
            order = torch.randperm(n, generator=generator) if shuffle else torch.arange(n)
            yield from order.split(mini_batch_size)

    return orders()


def pad_to_divisor(data: TensorDict, divisor: int) -> tuple[TensorDict, int]:
    """(batch, pad): a copy whose number of rows is a multiple of `divisor`, filled by its rows from the start."""
    n = _need_rows(data, "pad")
    if n == 0:
        raise ContractError("an empty batch has no row to pad with")
    pad = -n % divisor
    return (data, 0) if pad == 0 else (index_select_tensor_dict(data, [i % n for i in range(n + pad)]), pad)


def unpad(data: TensorDict, pad: int) -> TensorDict:
    """Drop the last `pad` rows."""
    return slice_tensordict(data, 0, _need_rows(data, "unpad") - pad) if pad else data


def contiguous(data: TensorDict) -> TensorDict:
    """A batch whose tensors own gapless memory, so that sending a part of a batch does not send the whole."""
    if not is_batched(data):
        return data
    return _map_rows(
        data,
        data.batch_size[0],
        dense=lambda t: t.contiguous() if t.untyped_storage().nbytes() == t.nbytes else t.clone(),
        jagged=lambda t: nested_from_values(nested_values(t).clone(), nested_lengths(t), ragged_dim(t)),
        objects=lambda values: values,
    )


def maybe_fix_3d_position_ids(data: TensorDict) -> TensorDict:
    """Kept for callers of the reference: [N, 4, j] position ids keep their ragged dimension here. Returns `data`."""
    return data


def assert_tensordict_eq(first: TensorDict, second: TensorDict) -> None:
    """`AssertionError` naming the first difference in size, names or values (NaN equals NaN)."""
    if first.batch_size != second.batch_size:
        raise AssertionError(f"batch sizes {list(first.batch_size)} and {list(second.batch_size)}")
    odd = sorted(set(first.keys()) ^ set(second.keys()))
    if odd:
        raise AssertionError(f"only one of the batches has {odd}")
    for key in first.keys():
        if not values_equal(first.get(key), second.get(key)):
            raise AssertionError(f"{key} differs: {first[key]!r} and {second[key]!r}")


def values_equal(first: Any, second: Any) -> bool:
    """Deep equality of two values of a batch; NaN equals NaN."""
    first, second = unwrap_non_tensor_data(first), unwrap_non_tensor_data(second)
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.is_nested != second.is_nested or first.dtype != second.dtype:
            return False
        if first.is_nested:
            return (
                ragged_dim(first) == ragged_dim(second)
                and torch.equal(nested_lengths(first), nested_lengths(second))
                and values_equal(nested_values(first), nested_values(second))
            )
        return first.shape == second.shape and torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.shape == second.shape and values_equal(first.tolist(), second.tolist())
    if type(first) is not type(second):
        return False
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(values_equal(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(values_equal, first, second))
    return bool(first == second or (first != first and second != second))
