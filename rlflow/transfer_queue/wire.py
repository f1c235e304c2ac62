"""The two frequent calls to the controller, put and locate, as one msgpack message each way.

Ray packs every argument and every object of a result by itself, which costs more than the call; bytes cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from rlflow.transfer_queue.column import heads_from_bytes, heads_to_bytes
from rlflow.transfer_queue.commit import BlockHead, PutReply
from rlflow.transfer_queue.locate import Cells, Location


def _pack(value: Any) -> bytes:
    return msgpack.packb(value, unicode_errors="surrogatepass")


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)


def pack_put(
    keys: Sequence[str], partition_id: str, tags: bytes | None, head: BlockHead | None, expect: bytes | None
) -> bytes:
    """Arguments of `TransferQueueController.put`."""
    block = None
    if head is not None:
        block = (head.unit, head.block_id, heads_to_bytes(head.fields), head.extent, head.nbytes, head.writer)
    return _pack((keys, partition_id, tags, block, expect))


def unpack_put(data: bytes) -> tuple[list[str], str, bytes | None, BlockHead | None, bytes | None]:
    """Inverse of `pack_put`."""
    keys, partition_id, tags, block, expect = _unpack(data)
    head = None
    if block is not None:
        unit, block_id, fields, extent, nbytes, writer = block
        place = None if extent is None else tuple(extent)
        head = BlockHead(unit, block_id, heads_from_bytes(fields), place, nbytes, writer)
    return keys, partition_id, tags, head, expect


def pack_put_reply(reply: PutReply) -> bytes:
    """The answer to a put."""
    return _pack((reply.differing, reply.packed, reply.fields))


def unpack_put_reply(data: bytes) -> PutReply:
    """Inverse of `pack_put_reply`."""
    return PutReply(*_unpack(data))


def pack_locate(
    keys: Sequence[str], partition_id: str, select_fields: Sequence[str] | None, strict: bool, missing_ok: Sequence[str]
) -> bytes:
    """Arguments of `TransferQueueController.locate`."""
    return _pack((keys, partition_id, select_fields, strict, missing_ok))


def unpack_locate(data: bytes) -> tuple[list[str], str, list[str] | None, bool, list[str]]:
    """Inverse of `pack_locate`."""
    return _unpack(data)


def pack_location(location: Location) -> bytes:
    """The answer to a locate; the keys are sent back only when some of them are unknown."""
    numbers: dict[int, int] = {}
    places: list[bytes] = []
    for pair in location.cells.values():
        for array in pair:
            if id(array) not in numbers:
                numbers[id(array)] = len(places)
                places.append(np.ascontiguousarray(array, np.int32).tobytes())
    cells = [(name, numbers[id(which)], numbers[id(row)]) for name, (which, row) in location.cells.items()]
    keys = location.keys if location.unknown else None
    return _pack((keys, location.unknown, location.blocks, places, cells, location.ragged))


def unpack_location(data: bytes, asked: list[str]) -> Location:
    """Inverse of `pack_location`; `asked` are the keys of the call."""
    keys, unknown, blocks, places, fields, ragged = _unpack(data)
    arrays = [np.frombuffer(place, np.int32) for place in places]
    cells: dict[str, Cells] = {name: (arrays[which], arrays[row]) for name, which, row in fields}
    return Location(
        asked if keys is None else keys,
        unknown,
        [(unit, block_id, None if extent is None else tuple(extent)) for unit, block_id, extent in blocks],
        cells,
        ragged,
    )
