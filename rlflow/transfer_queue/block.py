"""The bytes of a block: what one put wrote. The same in shared memory, between processes and in a checkpoint file.

    "TQB1"  u32 length of the header  header  |  buffers, each at a multiple of 64 bytes from the block's start

The header is one msgpack message, a list with one entry a column:
    [name, dtype, ragged, rows, shape, data start, data bytes, table start, table width]
`shape` is that of every row; where rows differ it is nil, and the table, int64 [rows, 1 + D], has the bytes and the
shape of each row.

Reading a block makes views of its bytes. What is a view of read-only bytes stays read-only, see `Column.data`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgpack
import numpy as np

from rlflow.transfer_queue.column import Column, bounds_of, common_shape, stack_shapes, uniform_column
from rlflow.transfer_queue.errors import TransferQueueError

ALIGNMENT = 64
_MAGIC = b"TQB1"
_PREFIX = struct.Struct("<4sI")


def aligned(offset: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


class Draft:
    """Columns laid out as a block that is not yet written.

    Attributes:
        nbytes: size of the block.
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        # Starts are relative to the end of the header, whose length depends on them otherwise.
        position = 0
        entries, buffers = [], []
        for name, column in columns.items():
            shape = None if column.dtype == "object" else common_shape(column.shapes)
            start, position = position, aligned(position + column.data.nbytes)
            buffers.append((start, column.data))
            table_start, width = 0, column.shapes.shape[1]
            if shape is None:
                table = np.concatenate([column.sizes[:, None], column.shapes], axis=1, dtype=np.int64)
                table_start, position = position, aligned(position + table.nbytes)
                buffers.append((table_start, table.reshape(-1).view(np.uint8)))
            entries.append(
                (name, column.dtype, column.ragged, len(column), shape, start, column.data.nbytes, table_start, width)
            )
        header = msgpack.packb(entries)
        self._prefix = _PREFIX.pack(_MAGIC, len(header)) + header
        self._body = aligned(len(self._prefix))
        self._buffers = buffers
        self.nbytes = self._body + position

    def write(self, target: np.ndarray) -> None:
        """Write the block to `target`, uint8 [nbytes]."""
        target[: len(self._prefix)] = np.frombuffer(self._prefix, np.uint8)
        for start, data in self._buffers:
            start += self._body
            target[start : start + data.nbytes] = data

    def to_array(self) -> np.ndarray:
        """The block in memory of its own."""
        target = np.empty(self.nbytes, np.uint8)
        self.write(target)
        return target


class _Entry(NamedTuple):
    dtype: str
    ragged: int | None
    rows: int
    shape: list[int] | None
    start: int
    nbytes: int
    table: int
    width: int


class BlockView:
    """A written block.

    Args:
        data: uint8, the block's bytes (more may follow).

    Raises:
        TransferQueueError: these bytes are no block.
    """

    __slots__ = ("_body", "_data", "_fields", "_tables")

    def __init__(self, data: np.ndarray) -> None:
        magic, length = _PREFIX.unpack_from(data.data)
        if magic != _MAGIC:
            raise TransferQueueError(f"no block of the table begins with {magic!r}; the storage is damaged")
        entries = msgpack.unpackb(data.data[_PREFIX.size : _PREFIX.size + length])
        self._data = data
        self._body = aligned(_PREFIX.size + length)
        self._fields = {entry[0]: _Entry(*entry[1:]) for entry in entries}
        self._tables: dict[str, tuple[np.ndarray, list[int]]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def columns(self) -> dict[str, Column]:
        """All columns, as views."""
        return {name: self.column(name) for name in self._fields}

    def column(self, name: str) -> Column:
        """One column, as a view."""
        entry = self._fields[name]
        column = self.rows(name, 0, entry.rows)
        column.ragged = entry.ragged
        return column

    def rows(self, name: str, first: int, last: int) -> Column:
        """Rows [first, last) of a column, as a view."""
        data, kind = self.piece(name, first, last)
        entry = self._fields[name]
        if isinstance(kind, np.ndarray):
            return Column(entry.dtype, data, kind[:, 0], kind[:, 1:])
        return uniform_column(entry.dtype, data, last - first, entry.nbytes // entry.rows, tuple(kind))

    def piece(self, name: str, first: int, last: int) -> tuple[np.ndarray, list[int] | np.ndarray]:
        """Bytes of the rows [first, last) of a column, with the shape of each, or with their part of the table."""
        entry = self._fields[name]
        start = self._body + entry.start
        if entry.shape is not None:
            row_bytes = entry.nbytes // entry.rows
            return self._data[start + first * row_bytes : start + last * row_bytes], entry.shape
        if name not in self._tables:
            table_start, count = self._body + entry.table, entry.rows * (1 + entry.width)
            table = self._data[table_start : table_start + 8 * count].view(np.int64).reshape(entry.rows, -1)
            # A list, as it is looked up number by number.
            self._tables[name] = table, bounds_of(table[:, 0]).tolist()
        table, bounds = self._tables[name]
        return self._data[start + bounds[first] : start + bounds[last]], table[first:last]

    def dtype(self, name: str) -> str:
        """The dtype of a column."""
        return self._fields[name].dtype


Runs = list[tuple[int, int, int]]


def runs_of(which: np.ndarray, places: np.ndarray) -> Runs:
    """Rows (block `which[i]`, row `places[i]`) as runs of neighbours: (block, first row, last row + 1)."""
    breaks = np.flatnonzero((which[1:] != which[:-1]) | (places[1:] != places[:-1] + 1)) + 1
    if not len(breaks):
        first = int(places[0])
        return [(int(which[0]), first, first + len(places))]
    starts = np.concatenate([[0], breaks])
    lengths = np.diff(np.concatenate([starts, [len(places)]]))
    firsts = places[starts]
    return list(zip(which[starts].tolist(), firsts.tolist(), (firsts + lengths).tolist(), strict=True))


def gather(blocks: Sequence[BlockView | None], name: str, runs: Runs) -> Column:
    """The rows of `runs`, one after the other.

    A single run is a view of its block; several are copied together.
    """
    if len(runs) == 1:
        number, first, last = runs[0]
        return _block(blocks, number).rows(name, first, last)
    pieces = [_block(blocks, number).piece(name, first, last) for number, first, last in runs]
    data = np.concatenate([piece for piece, _ in pieces])
    dtype = _block(blocks, runs[0][0]).dtype(name)
    kinds = [kind for _, kind in pieces]
    counts = [last - first for _, first, last in runs]
    if not any(isinstance(kind, np.ndarray) for kind in kinds) and len({len(kind) for kind in kinds}) == 1:
        row_bytes = [piece.nbytes // count for (piece, _), count in zip(pieces, counts, strict=True)]
        shapes = np.array(kinds, np.int64).reshape(len(kinds), -1)
        return Column(dtype, data, np.repeat(row_bytes, counts), np.repeat(shapes, counts, axis=0))
    tables = [
        kind if isinstance(kind, np.ndarray) else np.tile([piece.nbytes // count, *kind], (count, 1))
        for (piece, kind), count in zip(pieces, counts, strict=True)
    ]
    table = stack_shapes(tables)
    return Column(dtype, data, table[:, 0], table[:, 1:])


def _block(blocks: Sequence[BlockView | None], number: int) -> BlockView:
    block = blocks[number]
    assert block is not None, "the caller has opened every block that a cell lies in"
    return block


def blocks_hold(blocks: Sequence[BlockView | None], name: str, runs: Runs) -> bool:
    """Whether each block of the runs is there and has the column."""
    return all(blocks[number] is not None and name in _block(blocks, number) for number in {run[0] for run in runs})
