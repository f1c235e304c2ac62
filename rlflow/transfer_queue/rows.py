"""Rows and blocks, and how a row knows which block holds which of its fields.

A row keeps one (block, place) pair for each put that still provides some of its fields. Which fields each pair provides
is the row's *layout*, a tuple of field names a pair. Rows written by the same sequence of puts share their layout, so
putting, finding and clearing cost by row, not by cell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from rlflow.transfer_queue.fields import RowShapes, Schema
from rlflow.transfer_queue.tags import Names, Tag, TaggedKeys, Values

# Where a storage backend keeps a block. The table only hands it on; plain values, so that a checkpoint can hold it.
Extent = tuple[int, ...]
Layout = tuple[tuple[str, ...], ...]


@dataclass(slots=True, eq=False)
class Block:
    """What one put wrote into one storage unit.

    Attributes:
        unit, block_id, extent: where it is.
        nbytes: bytes of its columns.
        schema, shapes: what its columns are.
        writer, written, commit: lineage: who wrote it, when (seconds since 1970), as which commit of the table.
        live: rows that still have a field in it.
    """

    unit: int
    block_id: str
    extent: Extent | None
    nbytes: int
    schema: Schema
    shapes: tuple[RowShapes, ...]
    writer: str
    written: float
    commit: int
    live: int = 0


@dataclass(slots=True, eq=False)
class Row:
    """One row.

    Attributes:
        key, partition, index: its names; the index is never reused.
        names, values: its tag.
        layout: the fields that each pair of `parts` provides.
        parts: block, place, block, place, ... in the order of the puts.
        version: the change of its partition that touched it last; 0: none yet.
        alive: False once it is cleared.
    """

    key: str
    partition: str
    index: int
    names: Names = ()
    values: Values = ()
    layout: Layout = ()
    parts: tuple[Block | int, ...] = ()
    version: int = 0
    alive: bool = True

    @property
    def tag(self) -> Tag:
        """The tag as a new dict."""
        return dict(zip(self.names, self.values, strict=True))

    @property
    def fields(self) -> frozenset[str]:
        """The fields it has."""
        return fields_of(self.layout)

    def cell(self, name: str) -> tuple[Block, int]:
        """The block that holds one of its fields, and the place in it."""
        at = 2 * slots_of(self.layout)[name]
        return self.parts[at], self.parts[at + 1]  # type: ignore[return-value]


@lru_cache(maxsize=4096)
def fields_of(layout: Layout) -> frozenset[str]:
    """The fields a row of this layout has."""
    return frozenset(name for names in layout for name in names)


@lru_cache(maxsize=4096)
def slots_of(layout: Layout) -> dict[str, int]:
    """For each field the number of the pair that provides it."""
    return {name: slot for slot, names in enumerate(layout) for name in names}


@lru_cache(maxsize=4096)
def without(layout: Layout, gone: frozenset[str]) -> tuple[Layout, tuple[int, ...]]:
    """The layout less some fields, and the numbers of the pairs that provide nothing then and are left out of it."""
    left = [tuple(name for name in names if name not in gone) for names in layout]
    return tuple(names for names in left if names), tuple(slot for slot, names in enumerate(left) if not names)


@lru_cache(maxsize=4096)
def extended(layout: Layout, names: tuple[str, ...]) -> tuple[Layout, tuple[int, ...]]:
    """The layout after a put of `names`, and the numbers of the pairs that fall away."""
    rest, dropped = without(layout, frozenset(names))
    return (*rest, names), dropped


def drop_pairs(parts: tuple[Block | int, ...], dropped: tuple[int, ...]) -> tuple[Block | int, ...]:
    """The parts less some pairs."""
    return tuple(part for place, part in enumerate(parts) if place // 2 not in dropped)


def writer_of(block_id: str) -> str:
    """The writer named in a block id."""
    return block_id.rpartition(":")[0]


def tagged(rows: Iterable[Row]) -> TaggedKeys:
    """Keys and tags of rows."""
    rows = list(rows)
    return TaggedKeys.of([row.key for row in rows], [row.names for row in rows], [row.values for row in rows])
