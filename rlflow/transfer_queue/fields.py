"""What the controller knows of fields: the types and shapes of a block's columns, and those of a partition's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from rlflow.transfer_queue.column import FieldHead, row_shapes

Shape = tuple[int, ...]


class Schema(NamedTuple):
    """The fields of a block, in one order; blocks of equal fields share it."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    ragged: tuple[int | None, ...]


@lru_cache(maxsize=4096)
def _shared(schema: Schema) -> Schema:
    return schema


def schema_of(fields: Mapping[str, FieldHead]) -> Schema:
    """The schema of a block's columns."""
    heads = fields.values()
    return _shared(Schema(tuple(fields), tuple(h.dtype for h in heads), tuple(h.ragged for h in heads)))


# Row shapes of one field of a block: one shape for all rows, or int32 [N, D] padded with -1.
RowShapes = Shape | np.ndarray


def compact_shapes(fields: Mapping[str, FieldHead]) -> tuple[RowShapes, ...]:
    """Row shapes of each field, small: a row of the table should cost little whatever its fields."""
    shared: dict[bytes, RowShapes] = {}
    result = []
    for head in fields.values():
        shapes = head.shapes
        # Fields of equal lengths are common, and with them equal arrays.
        key = shapes.tobytes() + bytes([shapes.shape[1]])
        if key not in shared:
            uniform = not len(shapes) or bool((shapes == shapes[0]).all())
            shared[key] = row_shapes(shapes[:1])[0] if uniform and len(shapes) else shapes.astype(np.int32)
        result.append(shared[key])
    return tuple(result)


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
        if not shapes.size or shapes.min() < 0:
            return
        low, high = tuple(shapes.min(axis=0).tolist()), tuple(shapes.max(axis=0).tolist())
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
