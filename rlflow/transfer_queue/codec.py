"""Between a TensorDict and `Column`s.

Layout of what comes back
    - rows that are scalars: one dense tensor [N];
    - rows with dimensions: jagged, also when all rows have one length. The ragged dimension is the one in which the
      rows differ; if they do not, the one in which rows of this field have differed before, else the one the writer
      declared by a jagged tensor, else the first;
    - objects, rows of different rank, and rows that differ in several dimensions: `NonTensorStack`.

A reader that asks for `padded` gets dense tensors instead of jagged ones, for `list` a NonTensorStack of the rows.

Fields of equal row lengths share one offsets tensor, because torch refuses arithmetic between jagged tensors of
different offsets even when their lengths agree. Tensors are views of a column's bytes where these are the reader's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from rlflow.transfer_queue.column import OBJECT, Column, bounds_of, row_shapes, stack_shapes, uniform_column
from rlflow.transfer_queue.errors import QueueArgumentError, QueueTypeError
from rlflow.transfer_queue.objects import has_plain_bytes, pack, unpack
from rlflow.utils.nested import compact, jagged_view, nested_to_padded, ragged_dim
from rlflow.utils.tensordict_utils import make_stack

# -- writing ---------------------------------------------------------------------------------------


def encode_row(fields: Mapping[str, Any]) -> dict[str, Column]:
    """Columns of one row given as a dict: a tensor is the row's tensor, anything else one object."""
    columns = {}
    for name, value in fields.items():
        _check_name(name)
        if isinstance(value, Tensor) and value.is_nested:
            raise QueueArgumentError(f"field {name!r} of a single row is a nested tensor; use kv_batch_put for batches")
        if isinstance(value, (NonTensorData, NonTensorStack)):
            value = value.tolist()
        columns[name] = encode_column(name, value.unsqueeze(0) if isinstance(value, Tensor) else [value], 1)
    return columns


def encode_batch(fields: Any, size: int) -> dict[str, Column]:
    """Columns of a TensorDict of `size` rows."""
    if not isinstance(fields, TensorDictBase):
        raise QueueTypeError(f"fields of several rows must be a TensorDict, got {type(fields).__name__}")
    rows = int(fields.batch_size[0]) if len(fields.batch_size) else None
    if rows != size:
        raise QueueArgumentError(f"fields have batch size {tuple(fields.batch_size)}, but there are {size} keys")
    # Iterating a TensorDict iterates its rows, hence keys().
    columns = {}
    for name in fields.keys():
        _check_name(name)
        columns[name] = encode_column(name, fields.get(name), size)
    return columns


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not _is_text(name):
        raise QueueTypeError(f"a field is named by a string of whole characters, got {name!r}")


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def tensor_bytes(fields: Any) -> int:
    """Bytes of the tensors in a TensorDict: what encoding it will have to move."""
    values = fields.values() if isinstance(fields, TensorDictBase) else ()
    tensors = [v.values() if v.is_nested else v for v in values if isinstance(v, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def encode_column(name: str, value: Any, size: int) -> Column:
    """Column of one field: a tensor [size, ...], a jagged tensor, or a list / NonTensorStack of `size` objects."""
    if isinstance(value, Tensor):
        if not has_plain_bytes(value):
            raise QueueTypeError(
                f"field {name!r} is a tensor of layout {value.layout}, dtype {value.dtype} on {value.device}, whose "
                "values cannot be stored as they are; give a dense tensor with data (to_dense(), dequantize())"
            )
        column = _encode_nested(value) if value.is_nested else _encode_dense(value)
    elif isinstance(value, NonTensorStack):
        column = _encode_objects(name, value.tolist())
    elif isinstance(value, NonTensorData):
        column = _encode_objects(name, [value.data] * size)
    elif isinstance(value, list):
        column = _encode_objects(name, value)
    else:
        raise QueueTypeError(
            f"field {name!r} is a {type(value).__name__}; a field is a tensor, a jagged tensor or a NonTensorStack"
        )
    if len(column) != size:
        raise QueueArgumentError(f"field {name!r} has {len(column)} rows, but there are {size} keys")
    return column


def _bytes_of(tensor: Tensor) -> np.ndarray:
    # A conjugated or negated view only notes that its bytes are to be read otherwise.
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _encode_dense(value: Tensor) -> Column:
    if value.dim() == 0:
        raise QueueArgumentError("a field needs a row dimension; this one is a scalar tensor")
    size, shape = value.shape[0], tuple(value.shape[1:])
    row_bytes = value.element_size() * math.prod(shape)
    return uniform_column(_dtype_name(value), _bytes_of(value), size, row_bytes, shape)


def _encode_nested(value: Tensor) -> Column:
    if value.layout != torch.jagged:
        return _encode_rows(list(value.unbind()), None)
    value = compact(value.detach())
    axis = ragged_dim(value) - 1
    if axis > 0:
        return _encode_rows(list(value.unbind()), axis)
    values, offsets = value.values(), value.offsets().cpu()  # type: ignore[attr-defined]
    values = values[int(offsets[0]) : int(offsets[-1])]
    lengths = offsets.diff().numpy()
    inner = tuple(values.shape[1:])
    shapes = np.empty((len(lengths), values.dim()), np.int64)
    shapes[:, 0] = lengths
    shapes[:, 1:] = inner
    sizes = lengths * (values.element_size() * int(np.prod(inner, dtype=np.int64)))
    return Column(_dtype_name(values), _bytes_of(values), sizes, shapes, 0)


def _encode_rows(rows: Sequence[Tensor], ragged: int | None) -> Column:
    parts = [_bytes_of(row) for row in rows]
    shapes = [np.array([tuple(row.shape)], np.int64).reshape(1, -1) for row in rows]
    return Column(
        _dtype_name(rows[0]),
        np.concatenate(parts),
        np.array([len(part) for part in parts], np.int64),
        stack_shapes(shapes),
        ragged,
    )


def _encode_objects(name: str, values: Sequence[Any]) -> Column:
    parts = []
    for row, value in enumerate(values):
        try:
            parts.append(pack(value))
        except QueueTypeError as error:
            raise QueueTypeError(f"field {name!r}, row {row}: {error}") from None
    return Column(
        OBJECT,
        np.frombuffer(b"".join(parts), np.uint8),
        np.array([len(part) for part in parts], np.int64),
        np.empty((len(parts), 0), np.int64),
    )


# -- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How a reader wants rows of several lengths.

    Attributes:
        kind: "jagged", "padded" (dense, as long as the longest row of the batch) or "list" (one tensor a row).
        padding_side: "right": rows begin at the left; "left": they end at the right.
        padding_value: what stands beside them; one value, or {field: value} with 0 for fields that are not named.

    Raises:
        QueueArgumentError: (a ValueError) another kind or side.
    """

    kind: str = "jagged"
    padding_side: str = "right"
    padding_value: float | Mapping[str, float] = 0

    def __post_init__(self) -> None:
        if self.kind not in ("jagged", "padded", "list"):
            raise QueueArgumentError(f"layout={self.kind!r} is unknown; try jagged, padded or list")
        if self.padding_side not in ("right", "left"):
            raise QueueArgumentError(f"padding_side={self.padding_side!r} is unknown; try right or left")

    def value_for(self, name: str) -> float:
        """The padding value of a field."""
        return self.padding_value.get(name, 0) if isinstance(self.padding_value, Mapping) else self.padding_value


JAGGED = Layout()
# The first jagged tensor of a batch with certain row lengths, by what tells them apart: number and length of the rows,
# or all lengths as bytes.
Firsts = dict[tuple[int, int] | bytes, Tensor]


def decode_batch(columns: Mapping[str, Column], size: int, layout: Layout = JAGGED) -> TensorDict:
    """The TensorDict of `size` rows; nobody else sees the memory of its tensors."""
    firsts: Firsts = {}
    fields: dict[Any, Any] = {}
    for name, column in columns.items():
        if layout.kind == "list":
            fields[name] = make_stack(decode_rows(column))
            continue
        value = decode_column(column, firsts)
        if layout.kind == "padded" and isinstance(value, Tensor) and value.is_nested:
            value = nested_to_padded(value, layout.value_for(name), left=layout.padding_side == "left")
        fields[name] = value
    # The constructor looks at every value again, which costs more than all that was done here.
    return TensorDict._new_unsafe(fields, batch_size=torch.Size([size]))


def decode_rows(column: Column) -> list[Any]:
    """The rows of a column one by one: tensors or objects."""
    if column.dtype == OBJECT:
        data, bounds = np.ascontiguousarray(column.data).data, column.bounds().tolist()
        return [unpack(data[start:stop]) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
    flat = _flat(column)
    shapes = row_shapes(column.shapes)
    counts = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
    return [part.reshape(shape) for part, shape in zip(flat.split(counts), shapes, strict=True)]


def _flat(column: Column) -> Tensor:
    dtype = getattr(torch, column.dtype)
    if not len(column.data):
        return torch.empty(0, dtype=dtype)
    # Read-only bytes are somebody else's: a stored block, or a message in Ray's memory.
    data = column.data if column.data.flags.writeable else column.data.copy()
    return torch.from_numpy(data).view(dtype)


def decode_column(column: Column, firsts: Firsts) -> Tensor | NonTensorStack:
    """One field as a dense or a jagged tensor, or as a stack of objects; a batch's fields share offsets by `firsts`."""
    if column.dtype == OBJECT:
        return make_stack(decode_rows(column))
    shapes = column.shapes
    if shapes.shape[1] == 0:
        return _flat(column)
    uniform = shapes.strides[0] == 0
    low = shapes[0].tolist() if uniform else shapes.min(axis=0).tolist()
    high = low if uniform else shapes.max(axis=0).tolist()
    differing = [axis for axis, (a, b) in enumerate(zip(low, high, strict=True)) if a != b]
    if len(differing) > 1 or min(low) < 0:
        return make_stack(decode_rows(column))
    axis = differing[0] if differing else (column.ragged or 0)
    axis = axis if axis < len(low) else 0
    if axis == 0:
        values = _flat(column).view(-1, *low[1:]) if all(low[1:]) else _empty_rows(column)
    else:
        values = torch.cat(decode_rows(column), dim=axis)
    lengths = shapes[:, axis]
    key = (len(lengths), low[axis]) if low[axis] == high[axis] else lengths.tobytes()
    like = firsts.get(key)
    offsets = torch.from_numpy(bounds_of(lengths)) if like is None else like.offsets()  # type: ignore[attr-defined]
    view = jagged_view(values, offsets, axis + 1, low[axis], high[axis], like)
    firsts.setdefault(key, view)
    return view


def _empty_rows(column: Column) -> Tensor:
    """Values of rows that have an inner dimension of 0, whose number the bytes do not tell."""
    shape = (int(column.shapes[:, 0].sum()), *column.shapes[0, 1:].tolist())
    return torch.empty(shape, dtype=getattr(torch, column.dtype))


# -- in the storage unit ---------------------------------------------------------------------------


def apply_parser(
    columns: Mapping[str, Column], parser: Callable[[dict[str, list[Any]]], dict[str, Any]]
) -> dict[str, Column]:
    """What a put's `data_parser` makes of its columns.

    The parser gets {field: list of row values} and returns the same for the same fields; rows are tensors or objects.
    """
    before = {name: decode_rows(column) for name, column in columns.items()}
    after = parser(before)
    if not isinstance(after, Mapping) or after.keys() != columns.keys():
        found = sorted(after) if isinstance(after, Mapping) else f"a {type(after).__name__}"
        raise QueueArgumentError(f"data_parser must keep the fields {sorted(columns)}, it returned {found}")
    result = {}
    for name, column in columns.items():
        rows = list(after[name])
        if len(rows) != len(column):
            raise QueueArgumentError(f"data_parser made {len(rows)} rows of the {len(column)} of field {name!r}")
        tensors = rows and all(isinstance(row, Tensor) for row in rows)
        if tensors and len({row.dtype for row in rows}) > 1:
            kinds = sorted({str(row.dtype) for row in rows})
            raise QueueArgumentError(f"data_parser made rows of several dtypes of field {name!r}: {kinds}; cast them")
        result[name] = _encode_rows(rows, None) if tensors else _encode_objects(name, rows)
    return result
