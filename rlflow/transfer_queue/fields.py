"""What the controller knows of fields: the types and shapes of a block's columns, and those of a partition's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from rlflow.transfer_queue.column import FieldHead, row_shapes

Shape = tuple[int, ...]


class Schema(NamedTuple):
    """The fields of a block, in one order; blocks of equal fields share it."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    ragged: tuple[int | None, ...]


@lru_cache(maxsize=4096)
def shared_schema(schema: Schema) -> Schema:
    """The same object for equal schemas."""
    return schema


def schema_of(fields: Mapping[str, FieldHead]) -> Schema:
    """The schema of a block's columns."""
    heads = fields.values()
    return shared_schema(Schema(tuple(fields), tuple(h.dtype for h in heads), tuple(h.ragged for h in heads)))


# Row shapes of one field of a block: one shape for all rows, or int [N, D] padded with -1.
RowShapes = Shape | np.ndarray


def compact_shapes(fields: Mapping[str, FieldHead]) -> tuple[RowShapes, ...]:
    """Row shapes of each field, small: a row of the table should cost little whatever its fields."""
    shared: dict[Any, RowShapes] = {}
    result = []
    for head in fields.values():
        # Fields of equal lengths are common, and with them equal tables.
        if id(head.shapes) not in shared:
            compact = _compact(head.shapes)
            key = compact if isinstance(compact, tuple) else (compact.shape, compact.tobytes())
            shared[id(head.shapes)] = shared.setdefault(key, compact)
        result.append(shared[id(head.shapes)])
    return tuple(result)


def _compact(shapes: np.ndarray) -> RowShapes:
    if len(shapes) and (shapes.strides[0] == 0 or bool((shapes == shapes[0]).all())):
        return row_shapes(shapes[:1])[0]
    return shapes.astype(np.int32 if not shapes.size or shapes.max() < 2**31 else np.int64)


def shape_at(shapes: RowShapes, place: int) -> Shape:
    """The shape of one row."""
    return shapes if isinstance(shapes, tuple) else row_shapes(shapes[place : place + 1])[0]


@dataclass(slots=True)
class FieldState:
    """One field of a partition.

    Attributes:
        dtype: the dtype all its cells have.
        cells: rows that have the field.
        declared: the ragged dimension that a writer declared last.
        span: smallest and largest row shape seen, by rank: tells the ragged dimension even when one batch does not.
    """

    dtype: str
    cells: int = 0
    declared: int | None = None
    span: dict[int, tuple[Shape, Shape]] = field(default_factory=dict)

    def observe(self, head: FieldHead) -> None:
        """Take note of a put's rows."""
        if head.ragged is not None:
            self.declared = head.ragged
        shapes = head.shapes
        if not shapes.size or (shapes[0] if shapes.strides[0] == 0 else shapes).min() < 0:
            return
        uniform = shapes.strides[0] == 0  # as most blocks are; looking at one row is enough then
        low = tuple(shapes[0].tolist() if uniform else shapes.min(axis=0).tolist())
        high = low if uniform else tuple(shapes.max(axis=0).tolist())
        rank = shapes.shape[1]
        if rank in self.span:
            old_low, old_high = self.span[rank]
            low = tuple(map(min, low, old_low))
            high = tuple(map(max, high, old_high))
        self.span[rank] = (low, high)

    def ragged(self) -> int | None:
        """The ragged row dimension, where known."""
        differing = [
            axis
            for low, high in self.span.values()
            for axis, (a, b) in enumerate(zip(low, high, strict=True))
            if a != b
        ]
        return differing[0] if len(differing) == 1 else self.declared
