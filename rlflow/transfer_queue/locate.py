"""Where the cells of a read are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlflow.transfer_queue.errors import (
    MissingFieldError,
    NotReadyError,
    QueueArgumentError,
    StorageKeyNotFoundError,
    StorageUnitLostError,
    some,
)
from rlflow.transfer_queue.partition import Partition, common_fields, layouts_of
from rlflow.transfer_queue.rows import Block, Extent, Row, fields_of, slots_of

Cells = tuple[np.ndarray, np.ndarray]


@dataclass(slots=True)
class Location:
    """Where the cells of a read are.

    Attributes:
        keys: the keys found, in the order asked for.
        unknown: keys that do not exist (never with `strict`).
        blocks: (storage unit, block id, extent).
        cells: per field, for each key its number in `blocks` and its row in the block (int32 [N] each). Fields that lie
            in the same places share these arrays.
        ragged: per field the ragged row dimension, where known.
    """

    keys: list[str]
    unknown: list[str]
    blocks: list[tuple[int, str, Extent | None]]
    cells: dict[str, Cells]
    ragged: dict[str, int | None]


def locate(
    keys: Sequence[str],
    partition: Partition,
    select_fields: Sequence[str] | None,
    strict: bool,
    missing_ok: Sequence[str],
    lost_units: dict[int, str],
) -> Location:
    """See `Table.locate`."""
    known = partition.rows
    unknown = [key for key in keys if key not in known]
    if unknown and strict:
        raise StorageKeyNotFoundError(
            f"partition {partition.name!r} has no key {some(unknown)} ({len(unknown)} of {len(keys)} requested keys "
            "are unknown). They were never put, or cleared before this read"
        )
    if len(unknown) == len(keys):
        raise QueueArgumentError(f"partition {partition.name!r} has none of the {len(keys)} requested keys")
    found = [key for key in keys if key in known] if unknown else list(keys)
    rows = [known[key] for key in found]
    common = common_fields(rows)
    if select_fields is None:
        wanted = sorted(common)
    else:
        wanted = [name for name in dict.fromkeys(select_fields) if name in common]
        absent = [name for name in select_fields if name not in common and name not in missing_ok]
        if absent and strict:
            _raise_missing(absent[0], rows, partition, lost_units)
    if not common and not (strict and select_fields is not None):
        _raise_not_ready(rows, partition, lost_units)
    blocks, cells = _cells(rows, wanted)
    ragged = {name: partition.fields[name].ragged() for name in wanted}
    return Location(found, unknown, [(b.unit, b.block_id, b.extent) for b in blocks], cells, ragged)


def _cells(rows: Sequence[Row], names: Sequence[str]) -> tuple[list[Block], dict[str, Cells]]:
    layouts = layouts_of(rows)
    # Fields provided by the same pairs in every layout lie in the same places.
    together: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        together.setdefault(tuple(slots_of(layout)[name] for layout in layouts), []).append(name)
    numbers: dict[Block, int] = {}
    cells: dict[str, Cells] = {}
    for slots, fields in together.items():
        slot_of = {id(layout): 2 * slot for layout, slot in zip(layouts, slots, strict=True)}
        if len(set(slots)) == 1:
            at = 2 * slots[0]
            blocks = [row.parts[at] for row in rows]
            places = [row.parts[at + 1] for row in rows]
        else:
            offsets = [slot_of[id(row.layout)] for row in rows]
            blocks = [row.parts[at] for row, at in zip(rows, offsets, strict=True)]
            places = [row.parts[at + 1] for row, at in zip(rows, offsets, strict=True)]
        for block in dict.fromkeys(blocks):
            numbers.setdefault(block, len(numbers))  # type: ignore[arg-type]
        which = np.fromiter(map(numbers.__getitem__, blocks), np.int32, len(rows))  # type: ignore[arg-type]
        pair = (which, np.array(places, np.int32))
        cells.update(dict.fromkeys(fields, pair))
    # In the order of `names`.
    return list(numbers), {name: cells[name] for name in names}


def _raise_missing(name: str, rows: Sequence[Row], partition: Partition, lost_units: dict[int, str]) -> None:
    lacking = [row for row in rows if name not in fields_of(row.layout)]
    _raise_lost([row for row in lacking if name in partition.lost.get(row.key, ())], partition, lost_units)
    have = sorted(fields_of(lacking[0].layout))
    raise MissingFieldError(
        f"field {name!r} is absent from {len(lacking)} of {len(rows)} requested rows of partition {partition.name!r} "
        f"({some([row.key for row in lacking])}); the first of them has {have or 'no fields'}. Put the field before "
        "reading it, or name it in missing_ok if it is optional"
    )


def _raise_not_ready(rows: Sequence[Row], partition: Partition, lost_units: dict[int, str]) -> None:
    _raise_lost([row for row in rows if row.key in partition.lost], partition, lost_units)
    raise NotReadyError(
        f"the {len(rows)} requested rows of partition {partition.name!r} have no field in common (first row: "
        f"{sorted(fields_of(rows[0].layout)) or 'only a tag'}); they are not ready to be read"
    )


def _raise_lost(rows: Sequence[Row], partition: Partition, lost_units: dict[int, str]) -> None:
    """`StorageUnitLostError` if there are such rows."""
    if not rows:
        return
    lost = [partition.lost[row.key] for row in rows]
    units = sorted({unit for fields in lost for unit in fields.values()})
    fields = sorted({name for names in lost for name in names})
    named = "; ".join(f"{unit} ({lost_units.get(unit, 'gone')})" for unit in units)
    raise StorageUnitLostError(
        f"fields {some(fields, 8)} of {len(rows)} requested rows of partition {partition.name!r} "
        f"({some([row.key for row in rows])}) are lost with storage unit {named}. Clear these rows and make them "
        "again, or put the fields again"
    )
