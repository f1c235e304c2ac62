"""The table's metadata as plain values: `freeze` it in a moment, `encode` it at leisure, `thaw` it into a new table.

What a row holds is replaced, never changed, so a snapshot only notes it. Writers go on as
soon as `freeze` has returned; `encode` may run in another thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlflow.transfer_queue.capacity import Bounds
from rlflow.transfer_queue.changes import ChangeLog
from rlflow.transfer_queue.fields import FieldState, Schema, shared_schema
from rlflow.transfer_queue.partition import Partition
from rlflow.transfer_queue.rows import Block, Extent, Layout, Row
from rlflow.transfer_queue.table import Table
from rlflow.transfer_queue.tags import TagBatch, pack_batch, unpack_batch

State = dict[str, Any]


@dataclass(slots=True)
class FrozenPartition:
    """What a partition held; the rows by columns, each as long as there were rows."""

    name: str
    keys: list[str]
    indexes: list[int]
    tags: TagBatch
    layouts: list[Layout]
    parts: list[tuple[Block | int, ...]]
    fields: list[list[Any]]
    consumed: dict[str, list[int]]
    lost: dict[str, dict[str, int]]


@dataclass(slots=True)
class Snapshot:
    """What a table held, with its blocks in the order of their writing."""

    partitions: list[FrozenPartition]
    blocks: list[Block]
    next_index: int
    commits: int
    version: int  # the highest of all partitions


class Home(NamedTuple):
    """Where a restored block is now."""

    unit: int
    block_id: str
    extent: Extent | None


def freeze(table: Table) -> Snapshot:
    """Note what the table holds. The caller keeps its blocks from being freed while it needs them."""
    partitions = [_freeze_partition(table.partition(name)) for name in table.partitions()]
    return Snapshot(partitions, table.blocks(), table.next_index, table.commits, table.highest_version())


def _freeze_partition(partition: Partition) -> FrozenPartition:
    rows = partition.rows.values()
    return FrozenPartition(
        partition.name,
        list(partition.rows),
        [row.index for row in rows],
        TagBatch([row.names for row in rows], [row.values for row in rows]),
        [row.layout for row in rows],
        [row.parts for row in rows],
        [
            [name, state.dtype, state.declared, [[list(low), list(high)] for low, high in state.span.values()]]
            for name, state in partition.fields.items()
        ],
        {task: list(indexes) for task, indexes in partition.consumed.items()},
        {key: dict(fields) for key, fields in partition.lost.items()},
    )


# -- to plain values -------------------------------------------------------------------------------


def encode(snapshot: Snapshot) -> State:
    """Plain values, made for `objects.pack`: few and long lists."""
    number_of = {block: number for number, block in enumerate(snapshot.blocks)}
    schemas = {block.schema: 0 for block in snapshot.blocks}
    for number, schema in enumerate(schemas):
        schemas[schema] = number
    return {
        "next_index": snapshot.next_index,
        "commits": snapshot.commits,
        "version": snapshot.version,
        "schemas": [[list(part) for part in schema] for schema in schemas],
        "blocks": [
            [
                schemas[block.schema],
                [list(shapes) if isinstance(shapes, tuple) else shapes for shapes in block.shapes],
                block.nbytes,
                block.writer,
                block.written,
                block.commit,
            ]
            for block in snapshot.blocks
        ],
        "partitions": [_encode_partition(partition, number_of) for partition in snapshot.partitions],
    }


def _encode_partition(partition: FrozenPartition, number_of: Mapping[Block, int]) -> State:
    layouts = {id(layout): layout for layout in partition.layouts}
    layout_numbers = {key: number for number, key in enumerate(layouts)}
    return {
        "name": partition.name,
        "fields": partition.fields,
        "consumed": partition.consumed,
        "lost": partition.lost,
        "keys": partition.keys,
        "indexes": partition.indexes,
        "tags": pack_batch(partition.tags),
        "layouts": [[list(names) for names in layout] for layout in layouts.values()],
        "layout_of": [layout_numbers[id(layout)] for layout in partition.layouts],
        "block_of": [[number_of[block] for block in parts[::2]] for parts in partition.parts],  # type: ignore[index]
        "place_of": [list(parts[1::2]) for parts in partition.parts],
    }


# -- from plain values -----------------------------------------------------------------------------


def thaw(state: State, homes: Sequence[Home], bounds: Bounds, start_version: int) -> Table:
    """The table that `state` describes.

    Args:
        state: what `encode` returned.
        homes: where each of its blocks is now.
        bounds: the new table's bounds.
        start_version: version of every partition; a watcher of an earlier version is told that it has missed changes.
    """
    schemas = [shared_schema(Schema(*map(tuple, parts))) for parts in state["schemas"]]
    blocks = []
    for home, (schema, shapes, nbytes, writer, written, commit) in zip(homes, state["blocks"], strict=True):
        compact = tuple(tuple(item) if isinstance(item, list) else item for item in shapes)
        blocks.append(Block(*home, nbytes, schemas[schema], compact, writer, written, commit))
    partitions = [_thaw_partition(plain, blocks, start_version) for plain in state["partitions"]]
    return Table.restored(bounds, partitions, blocks, state["next_index"], state["commits"])


def _thaw_partition(state: State, blocks: Sequence[Block], start_version: int) -> Partition:
    partition = Partition(state["name"], log=ChangeLog(start_version))
    partition.consumed = {task: set(indexes) for task, indexes in state["consumed"].items()}
    partition.lost = state["lost"]
    for name, dtype, declared, spans in state["fields"]:
        span = {len(low): (tuple(low), tuple(high)) for low, high in spans}
        partition.fields[name] = FieldState(dtype, 0, declared, span)
    layouts: list[Layout] = [tuple(map(tuple, layout)) for layout in state["layouts"]]
    tags = unpack_batch(state["tags"])
    columns = (state["keys"], state["indexes"], tags.names, tags.values)
    parts = (state["layout_of"], state["block_of"], state["place_of"])
    for key, index, names, values, layout, numbers, places in zip(*columns, *parts, strict=True):
        pairs = [part for number, place in zip(numbers, places, strict=True) for part in (blocks[number], place)]
        partition.rows[key] = Row(key, partition.name, index, names, values, layouts[layout], tuple(pairs))
        for names_of_part in layouts[layout]:
            for name in names_of_part:
                partition.fields[name].cells += 1
        for block in pairs[::2]:
            if not block.live:
                partition.nbytes += block.nbytes
            block.live += 1
    return partition
