"""`Column`: one field of some rows as raw bytes. numpy only, so that controller and storage never load torch.

Layout: the rows' bytes one after the other in `data`; row i has `sizes[i]` bytes and the shape `shapes[i]`. A value
that is no tensor is one msgpack message a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np

OBJECT = "object"
_PAD = -1


@dataclass(slots=True)
class Column:
    """Rows of one field.

    Attributes:
        dtype: name of the torch dtype ("float32"), or "object" for msgpack rows.
        data: uint8 [total bytes]. Writable means: nobody else sees these bytes, they may be given away as they are.
        sizes: int64 [N], bytes of each row.
        shapes: int64 [N, D], shape of each row; rows of fewer dimensions are filled up with -1.
        ragged: the row dimension that the writer declared ragged, None if it declared none.
    """

    dtype: str
    data: np.ndarray
    sizes: np.ndarray
    shapes: np.ndarray
    ragged: int | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    def bounds(self) -> np.ndarray:
        """int64 [N + 1]: row i is `data[bounds[i] : bounds[i + 1]]`."""
        return bounds_of(self.sizes)


def bounds_of(sizes: np.ndarray) -> np.ndarray:
    """int64 [N + 1]: where rows of these sizes begin and end."""
    bounds = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    return bounds


def uniform_column(dtype: str, data: np.ndarray, rows: int, row_bytes: int, shape: tuple[int, ...]) -> Column:
    """A column whose rows all have `shape`; costs the same for any number of rows."""
    return Column(dtype, data, *_uniform(rows, row_bytes, shape))


@lru_cache(maxsize=1024)
def _uniform(rows: int, row_bytes: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """`sizes` and `shapes` of a uniform column; read-only, so that columns may share them."""
    sizes = np.broadcast_to(np.int64(row_bytes), (rows,))
    return sizes, np.broadcast_to(np.array(shape, np.int64), (rows, len(shape)))


def common_shape(shapes: np.ndarray) -> tuple[int, ...] | None:
    """The shape of all rows; None when they differ or when there are none."""
    if not len(shapes):
        return None
    if shapes.strides[0] and (shapes != shapes[0]).any():
        return None
    first = tuple(shapes[0].tolist())
    return None if _PAD in first else first


@dataclass(slots=True)
class FieldHead:
    """What the controller keeps of a column: its type and the shapes of its rows."""

    dtype: str
    shapes: np.ndarray
    ragged: int | None


def heads_of(columns: Mapping[str, Column]) -> dict[str, FieldHead]:
    """The columns without their data."""
    return {name: FieldHead(c.dtype, c.shapes, c.ragged) for name, c in columns.items()}


def heads_to_bytes(heads: Mapping[str, FieldHead]) -> bytes:
    """Heads as one msgpack message: each table of shapes once, as one shape where all rows agree."""
    tables: dict[Any, int] = {}
    fields = []
    for name, head in heads.items():
        shape = common_shape(head.shapes)
        if shape is not None:
            key: Any = (len(head.shapes), shape)
        else:
            narrow = head.shapes.size == 0 or int(head.shapes.max()) < 2**31
            kind = np.int32 if narrow else np.int64
            key = (*head.shapes.shape, np.dtype(kind).str, head.shapes.astype(kind).tobytes())
        fields.append((name, head.dtype, head.ragged, tables.setdefault(key, len(tables))))
    return msgpack.packb([list(tables), fields])


def heads_from_bytes(data: bytes) -> dict[str, FieldHead]:
    """Inverse of `heads_to_bytes`; equal tables are one array."""
    tables, fields = msgpack.unpackb(data)
    shapes = [_shapes_from(*table) for table in tables]
    return {name: FieldHead(dtype, shapes[number], ragged) for name, dtype, ragged, number in fields}


def _shapes_from(rows: int, *rest: Any) -> np.ndarray:
    if len(rest) == 1:
        return np.broadcast_to(np.array(rest[0], np.int64), (rows, len(rest[0])))
    width, kind, data = rest
    return np.frombuffer(data, kind).reshape(rows, width)


def row_shapes(shapes: np.ndarray) -> list[tuple[int, ...]]:
    """Per-row shapes without the filling."""
    return [tuple(n for n in row if n != _PAD) for row in shapes.tolist()]


def stack_shapes(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Tables of shapes one below the other, filled up to the widest."""
    tables = list(parts)
    width = max(part.shape[1] for part in tables)
    if all(part.shape[1] == width for part in tables):
        return tables[0] if len(tables) == 1 else np.concatenate(tables)
    return np.concatenate([np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=_PAD) for p in tables])
