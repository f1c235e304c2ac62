"""Jagged tensors: rows of different length in one tensor, without padding.

A jagged field is a `torch.nested` tensor of layout `torch.jagged`, shape [N, j] (j: ragged), [N, j, D], or [N, D, j]
for rows that are ragged in their last dimension, as position ids of shape (4, L) are.

Invariants
    - Every function works on (values, lengths), never row by row, keeps the ragged dimension of its input and lets
      gradients through.
    - torch tells two jagged tensors apart by the identity of their offsets, and refuses arithmetic between tensors
      of equal lengths but different offsets: build a field that must line up with another by `nested_like`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from rlflow.utils.errors import ContractError

# torch's own jagged tensors call a deprecated function of torch, which says so once in every process.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def is_nested(value: object) -> bool:
    """Whether `value` is a jagged tensor."""
    return isinstance(value, Tensor) and value.is_nested


def check_jagged(tensor: Tensor, name: str = "tensor") -> Tensor:
    """Return `tensor`; `ContractError` unless it is nested with layout `torch.jagged`."""
    if not is_nested(tensor):
        raise ContractError(
            f"{name} is a dense {type(tensor).__name__}, a jagged tensor is needed; see padded_to_nested"
        )
    if tensor.layout != torch.jagged:
        raise ContractError(
            f"{name} is a nested tensor of layout {tensor.layout}; only torch.jagged is supported. "
            "Build it with rlflow.utils.tensordict_utils.nested_from_list."
        )
    return tensor


def ragged_dim(tensor: Tensor) -> int:
    """The ragged dimension of a jagged tensor, counted with the batch dimension (1 for [N, j])."""
    return int(check_jagged(tensor)._ragged_idx)  # type: ignore[attr-defined]


def _offsets(tensor: Tensor) -> Tensor:
    return tensor.offsets()  # type: ignore[attr-defined]


def nested_from_values(values: Tensor, lengths: Tensor | Sequence[int], ragged: int = 1) -> Tensor:
    """Cut `values` into rows.

    Args:
        values: the rows one after the other along dimension `ragged - 1`: [sum(lengths), ...] for `ragged=1`.
        lengths: [N], the length of each row.
        ragged: the ragged dimension of the result, counted with the batch dimension.

    Raises:
        ContractError: the lengths do not add up to the size of `values`.
    """
    lengths = torch.as_tensor(lengths, dtype=torch.int64, device=values.device)
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=values.device)
    torch.cumsum(lengths, dim=0, out=offsets[1:])
    total = int(offsets[-1])
    if total != values.shape[ragged - 1]:
        raise ContractError(
            f"{lengths.numel()} lengths add up to {total}, but the values have {values.shape[ragged - 1]} entries "
            f"along dimension {ragged - 1} (shape {tuple(values.shape)})"
        )
    # Lower and upper bounds must be given, or torch computes them again (and synchronises) at the first use.
    low, high = (int(lengths.min()), int(lengths.max())) if lengths.numel() else (0, 0)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged, min_seqlen=low, max_seqlen=high)


def jagged_view(
    values: Tensor, offsets: Tensor, ragged: int, low: int, high: int, like: Tensor | None = None
) -> Tensor:
    """A jagged tensor of known parts, made as torch makes results of its own; a third of the public way's cost.

    Args:
        values: the rows one after the other along dimension `ragged - 1`.
        offsets: int64 [N + 1], where rows begin and end; the result keeps this very tensor.
        ragged: the ragged dimension of the result, counted with the batch dimension.
        low, high: shortest and longest row.
        like: a jagged tensor with these offsets, whose notes on them are shared; halves the cost once more.
    """
    from torch.nested._internal.nested_tensor import NestedTensor, _store_val_in_tensor

    if like is not None:
        result = NestedTensor(values, offsets, _ragged_idx=ragged)
        result._metadata_cache = dict(like._metadata_cache)  # type: ignore[attr-defined]
        return result
    lengths = {"min_seqlen": _store_val_in_tensor(low), "max_seqlen": _store_val_in_tensor(high)}
    return NestedTensor(values, offsets, _metadata_cache=lengths, _ragged_idx=ragged)


def nested_from_list(rows: Sequence[Tensor], ragged: int | None = None) -> Tensor:
    """Join rows, each without a batch dimension, into one jagged tensor.

    Args:
        rows: at least one tensor; all equal in every dimension but the ragged one.
        ragged: the ragged dimension counted with the batch dimension; None: the last one.

    Raises:
        ContractError: no rows, scalars, or rows that differ in another dimension.
    """
    if not rows:
        raise ContractError("an empty list has no dtype and no shape to build a jagged tensor from")
    first = rows[0]
    if first.dim() == 0:
        raise ContractError("rows of a jagged tensor need a dimension; got scalars, use torch.stack")
    ragged = first.dim() if ragged is None else ragged
    axis = ragged - 1
    shapes = {tuple(row.shape[:axis]) + tuple(row.shape[axis + 1 :]) for row in rows}
    if len(shapes) > 1 or len({row.dim() for row in rows}) > 1:
        shown = ", ".join(str(tuple(row.shape)) for row in rows[:4])
        raise ContractError(
            f"rows may differ in dimension {axis} only, got shapes {shown}. Pass ragged=1 when the first dimension of "
            "the rows is the ragged one."
        )
    return nested_from_values(torch.cat(list(rows), dim=axis), [row.shape[axis] for row in rows], ragged)


def nested_like(values: Tensor, like: Tensor) -> Tensor:
    """A jagged tensor of `values` ([sum(lengths), ...]) that shares its offsets with `like`, so that they add up."""
    check_jagged(like, "like")
    like = compact(like)
    if values.shape[0] != int(_offsets(like)[-1]):
        raise ContractError(
            f"values have {values.shape[0]} entries, the rows of `like` have {int(_offsets(like)[-1])} together"
        )
    return torch.nested.nested_tensor_from_jagged(
        values,
        _offsets(like),
        min_seqlen=like._get_min_seqlen(),  # type: ignore[attr-defined]
        max_seqlen=like._get_max_seqlen(),  # type: ignore[attr-defined]
    )


def nested_lengths(tensor: Tensor) -> Tensor:
    """Row lengths of a jagged tensor, int64 [N], on its device."""
    check_jagged(tensor)
    lengths = tensor.lengths()  # type: ignore[attr-defined]
    return (_offsets(tensor).diff() if lengths is None else lengths).to(torch.int64)


def compact(tensor: Tensor) -> Tensor:
    """The same jagged tensor with its values gapless in row order (views made by `narrow` have gaps)."""
    check_jagged(tensor)
    if tensor.lengths() is None and tensor.is_contiguous():  # type: ignore[attr-defined]
        return tensor
    return nested_index_select(tensor, torch.arange(tensor.shape[0], device=tensor.device))


def nested_values(tensor: Tensor) -> Tensor:
    """The rows of a jagged tensor one after the other along its ragged dimension ([sum(lengths), ...] for [N, j])."""
    return compact(tensor).values()


def nested_index_select(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows `index` (int64 [M], repeats allowed) of a jagged tensor [N, ...] -> [M, ...]."""
    ragged = ragged_dim(tensor)
    device = tensor.device
    index = index.to(device)
    lengths = nested_lengths(tensor)[index]
    ends = lengths.cumsum(0)
    # Position p of the output lies in output row r(p); its source is start(r) + (p - first position of r).
    shift = torch.repeat_interleave(_offsets(tensor)[:-1][index] - (ends - lengths), lengths)
    source = torch.arange(int(ends[-1]) if ends.numel() else 0, device=device) + shift
    return nested_from_values(tensor.values().index_select(ragged - 1, source), lengths, ragged)


def nested_row_sums(tensor: Tensor) -> Tensor:
    """Sum of each row of a jagged tensor [N, j] -> [N]; integers, bools and half precision are summed as fp32."""
    values = nested_values(tensor)
    values = values if values.dtype in (torch.float32, torch.float64) else values.float()
    return torch.segment_reduce(values, "sum", lengths=nested_lengths(tensor), unsafe=True, initial=0)


def nested_narrow(tensor: Tensor, start: int, length: int) -> Tensor:
    """Rows [start, start + length) of a jagged tensor, sharing its memory."""
    tensor = compact(tensor)
    ragged = ragged_dim(tensor)
    first, last = int(_offsets(tensor)[start]), int(_offsets(tensor)[start + length])
    lengths = nested_lengths(tensor)[start : start + length]
    return nested_from_values(tensor.values().narrow(ragged - 1, first, last - first), lengths, ragged)


def concat_nested_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Join jagged tensors along the batch dimension; `ContractError` when their ragged dimensions differ."""
    if not tensors:
        raise ContractError("no jagged tensors to concatenate")
    dims = {ragged_dim(tensor) for tensor in tensors}
    if len(dims) > 1 or len({tensor.dim() for tensor in tensors}) > 1:
        raise ContractError(
            f"cannot concatenate jagged tensors of shapes {[tuple(t.shape) for t in tensors]}: "
            f"their ragged dimensions {sorted(dims)} or numbers of dimensions differ"
        )
    ragged = dims.pop()
    values = torch.cat([nested_values(tensor) for tensor in tensors], dim=ragged - 1)
    return nested_from_values(values, torch.cat([nested_lengths(tensor) for tensor in tensors]), ragged)


def nested_to_padded(tensor: Tensor, pad: float = 0.0, width: int | None = None, *, left: bool = False) -> Tensor:
    """[N, j, ...] -> dense [N, width, ...], rows at the left and `pad` behind them ([N, D, j] -> [N, D, width]).

    Args:
        tensor: a jagged tensor.
        pad: value behind the rows.
        width: None: the longest row.
        left: rows at the right, `pad` before them.

    Raises:
        ContractError: a row is longer than `width`; nothing is ever cut off.
    """
    ragged = ragged_dim(tensor)
    lengths = nested_lengths(tensor)
    longest = int(lengths.max()) if lengths.numel() else 0
    width = longest if width is None else width
    if longest > width:
        raise ContractError(f"cannot pad rows to width {width}: the longest has {longest} entries")
    values = nested_values(tensor).movedim(ragged - 1, 0)
    dense = values.new_full((lengths.numel(), width, *values.shape[1:]), pad)
    # Three times as fast as assignment by a bool index, which first makes a list of all positions.
    entries = _entries(lengths, width, dense)
    dense = dense.masked_scatter(entries.flip(1) if left else entries, values)
    return dense.movedim(1, ragged)


def padded_to_nested(dense: Tensor, lengths: Tensor | Sequence[int]) -> Tensor:
    """Dense [N, W, ...] -> jagged [N, j, ...]: the first `lengths[i]` entries of row i."""
    lengths = torch.as_tensor(lengths, dtype=torch.int64, device=dense.device)
    if lengths.shape != dense.shape[:1] or (lengths.numel() and int(lengths.max()) > dense.shape[1]):
        raise ContractError(
            f"lengths {lengths.tolist()[:8]} do not fit a dense tensor of shape {tuple(dense.shape)}: one length "
            "a row, none over its width"
        )
    values = dense.masked_select(_entries(lengths, dense.shape[1], dense))
    return nested_from_values(values.view(int(lengths.sum()), *dense.shape[2:]), lengths)


def _entries(lengths: Tensor, width: int, dense: Tensor) -> Tensor:
    """`length_mask` with as many dimensions as `dense` [N, width, ...]."""
    return length_mask(lengths, width).view(lengths.numel(), width, *[1] * (dense.dim() - 2))


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """Bool [N, width], true at the first `lengths[i]` positions of row i."""
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)
