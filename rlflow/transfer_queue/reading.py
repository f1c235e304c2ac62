"""A read of cells that lie in several blocks: what is near is mapped, the rest is asked for, all of it is merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlflow.transfer_queue.block import BlockView, Runs, gather, runs_of
from rlflow.transfer_queue.column import Column
from rlflow.transfer_queue.segment import HEADER_BYTES, SegmentGoneError, UnitAddress, map_for_reading
from rlflow.transfer_queue.storage import Extent, Place

Views = list[BlockView | None]
OwnCells = dict[str, tuple[np.ndarray, np.ndarray]]

# Views keep a whole segment from being used anew; what is less than both of these is copied instead.
_SMALLEST_PART = 16  # of the segment
_SMALLEST_BYTES = 4 << 20


def open_segments(blocks: Sequence[Place], address_of: Callable[[int], UnitAddress | None]) -> Views:
    """The blocks that lie in shared memory of this machine, copy-on-write; None for all others.

    Args:
        blocks: where they are.
        address_of: the unit whose memory is visible from here, None for another one.
    """
    segments: dict[tuple[int, int], np.ndarray | None] = {}
    views: Views = []
    for unit, _, extent in blocks:
        address = None if extent is None else address_of(unit)
        if extent is None or address is None:
            views.append(None)
            continue
        fd, serial, offset, nbytes = extent
        if (unit, serial) not in segments:
            try:
                segments[unit, serial] = map_for_reading(address, fd, serial)
            except SegmentGoneError:
                segments[unit, serial] = None  # the unit will say whether the block is gone
        segment = segments[unit, serial]
        views.append(None if segment is None else BlockView(segment[offset : offset + nbytes]))
    return views


@dataclass(slots=True)
class UnitRequest:
    """The cells to ask a unit for.

    Attributes:
        unit: whom.
        blocks: ids and extents.
        cells: as in `StorageClient.read`, numbers counting in `blocks`.
        rows: for each field, which rows of the whole read these are.
    """

    unit: int
    blocks: list[tuple[str, Extent | None]]
    cells: OwnCells
    rows: dict[str, np.ndarray]

    def redirect(self, cells: OwnCells, number: int) -> None:
        """The answer has come as block `number`: there, one after the other, are these rows now."""
        for name, rows in self.rows.items():
            which, places = cells[name]
            which, places = which.copy(), places.copy()
            which[rows], places[rows] = number, np.arange(len(rows))
            cells[name] = which, places


def ask_for(blocks: Sequence[Place], views: Views, cells: OwnCells) -> list[UnitRequest]:
    """One request for each unit that has blocks which are not open here."""
    requests = []
    for unit in sorted({blocks[number][0] for number, view in enumerate(views) if view is None}):
        numbers = [n for n, view in enumerate(views) if view is None and blocks[n][0] == unit]
        within = np.full(len(blocks), -1, np.int64)
        within[numbers] = np.arange(len(numbers))
        asked: OwnCells = {}
        rows = {}
        for name, (which, places) in cells.items():
            found = np.flatnonzero(within[which] >= 0)
            if len(found):
                asked[name] = within[which[found]], places[found]
                rows[name] = found
        requests.append(UnitRequest(unit, [blocks[n][1:] for n in numbers], asked, rows))
    return requests


def merge(views: Views, cells: OwnCells) -> dict[str, Column]:
    """The columns, each with its rows in order."""
    runs_at: dict[tuple[int, int], Runs] = {}  # fields of one put lie in the same places
    columns = {}
    for name, (which, places) in cells.items():
        key = id(which), id(places)
        if key not in runs_at:
            runs_at[key] = runs_of(which, places)
        columns[name] = gather(views, name, runs_at[key])
    _own_small_views(columns)
    return columns


def _own_small_views(columns: dict[str, Column]) -> None:
    """Copy what would hold a segment for the sake of a small part of it."""
    seen: dict[int, int] = {}
    segments: dict[int, np.ndarray] = {}
    for column in columns.values():
        segment = _segment_of(column.data)
        if segment is not None:
            segments[id(segment)] = segment
            seen[id(segment)] = seen.get(id(segment), 0) + column.data.nbytes
    small = {
        key
        for key, segment in segments.items()
        if seen[key] < _SMALLEST_BYTES and seen[key] * _SMALLEST_PART < segment.nbytes - HEADER_BYTES
    }
    for column in columns.values():
        segment = _segment_of(column.data)
        if segment is not None and id(segment) in small:
            column.data = column.data.copy()


def _segment_of(data: np.ndarray) -> np.ndarray | None:
    """The whole segment that an array is a view of; None for memory of its own, and for a message's."""
    base = data.base
    return base if data.flags.writeable and isinstance(base, np.ndarray) else None
