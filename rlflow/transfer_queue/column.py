"""`Column`: one field of some rows as raw bytes. numpy only, so that controller and storage never load torch.

Layout: the rows' bytes one after the other in `data`; row i has `sizes[i]` bytes and the shape `shapes[i]`. A value
that is no tensor is one msgpack message a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

OBJECT = "object"
_PAD = -1


@dataclass(slots=True)
class Column:
    """Rows of one field.

    Attributes:
        dtype: name of the torch dtype ("float32"), or "object" for msgpack rows.
        data: uint8 [total bytes].
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
        bounds = np.zeros(len(self.sizes) + 1, np.int64)
        np.cumsum(self.sizes, out=bounds[1:])
        return bounds


@dataclass(slots=True)
class FieldHead:
    """What the controller keeps of a column: its type and the shapes of its rows."""

    dtype: str
    shapes: np.ndarray
    ragged: int | None


def head_of(column: Column) -> FieldHead:
    """The column without its data."""
    return FieldHead(column.dtype, column.shapes, column.ragged)


def row_shapes(shapes: np.ndarray) -> list[tuple[int, ...]]:
    """Per-row shapes without the filling."""
    return [tuple(n for n in row if n != _PAD) for row in shapes.tolist()]


def _stack_shapes(parts: Sequence[np.ndarray]) -> np.ndarray:
    width = max(part.shape[1] for part in parts)
    if all(part.shape[1] == width for part in parts):
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    return np.concatenate([np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=_PAD) for p in parts])


def gather(columns: Sequence[Column], which: np.ndarray, places: np.ndarray) -> Column:
    """Row i of the result is row `places[i]` of `columns[which[i]]`.

    Neighbouring rows are copied in one piece, and a single piece is not copied at all: the result may share memory
    with its source.
    """
    breaks = np.flatnonzero((np.diff(which) != 0) | (np.diff(places) != 1)) + 1
    starts = [0, *breaks.tolist()]
    stops = [*breaks.tolist(), len(places)]
    bounds = {int(block): columns[block].bounds() for block in np.unique(which)}
    data, sizes, shapes = [], [], []
    for start, stop in zip(starts, stops, strict=True):
        block, first = int(which[start]), int(places[start])
        last = first + stop - start
        column = columns[block]
        data.append(column.data[bounds[block][first] : bounds[block][last]])
        sizes.append(column.sizes[first:last])
        shapes.append(column.shapes[first:last])
    return Column(
        columns[int(which[0])].dtype,
        data[0] if len(data) == 1 else np.concatenate(data),
        np.concatenate(sizes),
        _stack_shapes(shapes),
    )


def scatter(parts: Sequence[tuple[np.ndarray, Column]], size: int) -> Column:
    """Inverse of a split by rows: row j of a part becomes row `rows[j]` of the result, which has `size` rows."""
    if len(parts) == 1 and np.array_equal(parts[0][0], np.arange(size)):
        return parts[0][1]
    which, places = np.empty(size, np.int64), np.empty(size, np.int64)
    for number, (rows, column) in enumerate(parts):
        which[rows] = number
        places[rows] = np.arange(len(column))
    return gather([column for _, column in parts], which, places)


def owned(column: Column) -> Column:
    """A copy that does not pin the message or shared memory it came in."""
    return Column(column.dtype, column.data.copy(), column.sizes.copy(), column.shapes.copy(), column.ragged)
