"""What a `BatchMeta` says of a field: `{dtype, shape, is_nested, is_non_tensor[, per_sample_shapes]}`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlflow.transfer_queue.errors import QueueArgumentError

FieldSchema = dict[str, Any]


def per_row(schema: FieldSchema, size: int) -> list[tuple[int, ...] | None]:
    """The shape of each of `size` rows of a field; None for non-tensors."""
    shapes = schema.get("per_sample_shapes")
    if shapes is not None:
        return list(shapes)
    shape = schema.get("shape")
    return [None if shape is None else tuple(shape)] * size


def make_schema(dtype: Any, shapes: Sequence[tuple[int, ...] | None], nested: bool | None = None) -> FieldSchema:
    """Schema of one field from the shapes of its rows; None means a non-tensor, `nested=None` decides by the shapes."""
    if any(shape is None for shape in shapes) or not shapes:
        return {"dtype": dtype, "shape": None, "is_nested": False, "is_non_tensor": dtype is None}
    rows = [tuple(int(n) for n in shape or ()) for shape in shapes]
    uniform = len(set(rows)) == 1
    if nested is None:
        nested = not uniform
    schema = {"dtype": dtype, "shape": rows[0] if uniform else None, "is_nested": nested, "is_non_tensor": False}
    if nested:
        schema["per_sample_shapes"] = rows
    return schema


def extract_field_schema(data: Any) -> dict[str, FieldSchema]:
    """Schema of each field of a TensorDict with N rows.

    `shape` is a row's shape, (1,) for a field of scalars; jagged fields list the shape of every row in
    `per_sample_shapes`. ValueError when a field does not have N rows.
    """
    import torch

    if len(data.batch_size) == 0:
        raise QueueArgumentError("the data has no batch dimension, so it has no rows to describe")
    size = int(data.batch_size[0])
    schema: dict[str, FieldSchema] = {}
    for name in data.keys():  # iterating a TensorDict would give its rows
        value = data.get(name)
        if int(value.shape[0] if isinstance(value, torch.Tensor) else value.batch_size[0]) != size:
            raise QueueArgumentError(f"field {name!r} does not have the {size} rows of the batch")
        if not isinstance(value, torch.Tensor):
            schema[name] = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
        elif value.is_nested:
            schema[name] = make_schema(value.dtype, [tuple(row.shape) for row in value.unbind()], nested=True)
        else:
            row_shape = tuple(value.shape[1:]) or (1,)
            schema[name] = {"dtype": value.dtype, "shape": row_shape, "is_nested": False, "is_non_tensor": False}
    return schema


def join_schema(schemas: Sequence[FieldSchema], sizes: Sequence[int]) -> FieldSchema:
    """Schema of a field over parts of `sizes` rows, put one after the other."""
    shapes = [shape for schema, size in zip(schemas, sizes, strict=True) for shape in per_row(schema, size)]
    nested = any(schema["is_nested"] for schema in schemas) or None
    joined = make_schema(schemas[0]["dtype"], shapes, nested)
    if not shapes:
        return dict(schemas[0])
    joined["is_non_tensor"] = all(schema["is_non_tensor"] for schema in schemas)
    return joined


def filled_shapes(shapes: Sequence[tuple[int, ...] | None]) -> list[tuple[int, ...] | None]:
    """Shapes in which rows that are not ready have the shape of the others, or no elements where those differ."""
    present = {shape for shape in shapes if shape is not None}
    if not present:
        return list(shapes)
    common = min(present) if len(present) == 1 else (0,) * len(min(present))
    return [common if shape is None else shape for shape in shapes]
