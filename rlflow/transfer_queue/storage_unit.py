"""A storage unit: blocks in an arena of shared memory, or in the memory of its process where there is none.

`SimpleStorage` runs one in each of its Ray actors, `Local` has one in the process. torch is loaded only when a put
brings a `data_parser`.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from rlflow.transfer_queue.arena import Arena, Extent, Lease
from rlflow.transfer_queue.block import BlockView, Draft, blocks_hold, gather, runs_of
from rlflow.transfer_queue.column import Column, FieldHead, heads_of
from rlflow.transfer_queue.errors import StorageKeyNotFoundError
from rlflow.transfer_queue.segment import UnitAddress
from rlflow.transfer_queue.storage import Cells, DataParser, FileEntry
from rlflow.utils.errors import CheckpointError


def start_of_process(pid: int) -> str | None:
    """When a process of this machine was started, in clock ticks; None when there is none of this number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name of the program, in parentheses, may hold anything
    return None if fields[0] in "ZX" else fields[19]


class StorageUnit:
    """See the module's docstring. Safe to call from any thread.

    Args:
        node: the Ray node it is on.
        shared_memory: whether blocks go into segments that other processes can map.
        idle_s: seconds until the memory of a free segment is given back.
        limit: bytes of all segments together at most; None for no limit.
    """

    def __init__(self, node: str = "", shared_memory: bool = False, idle_s: float = 60.0, limit: int | None = None):
        self._address = UnitAddress(node, os.getpid(), secrets.token_bytes(16))
        self._arena = Arena(self._address.nonce, idle_s, limit) if shared_memory else None
        self._private: dict[str, np.ndarray] = {}
        self._writers: dict[str, tuple[int, str | None]] = {}  # name -> number and start of its process

    def describe(self) -> tuple[UnitAddress, bool]:
        """Its address, and whether it lends segments."""
        return self._address, self._arena is not None

    # -- for the processes of this machine ---------------------------------------------------------

    def lease(self, writer: str, process: tuple[int, str | None], nbytes: int) -> Lease | None:
        """Lend a segment to a client, which is the process of this number and start.

        None when there is no memory for it, or when the process is not to be seen from here: nobody would notice its
        end.
        """
        pid, start = process
        if self._arena is None or start is None or start_of_process(pid) != start:
            return None
        self._writers[writer] = process
        return self._arena.lease(writer, nbytes)

    def seal(self, writer: str, serial: int, block_ids: Sequence[str]) -> None:
        """A lent segment comes back, with these blocks in it."""
        if self._arena is not None:
            self._arena.seal(serial, block_ids, writer)

    # -- for everybody -----------------------------------------------------------------------------

    def write(
        self, block_id: str, data: np.ndarray, parser: DataParser | None = None
    ) -> tuple[Extent | None, dict[str, FieldHead] | None]:
        """Store a block that came in a message. Returns where, and its heads if a parser has changed its columns."""
        if parser is None:
            return self._store(block_id, data, keep=False), None
        return self.write_columns(block_id, BlockView(data).columns(), parser)

    def write_columns(
        self, block_id: str, columns: Mapping[str, Column], parser: DataParser | None
    ) -> tuple[Extent | None, dict[str, FieldHead] | None]:
        """Store columns of this process."""
        if parser is not None:
            from rlflow.transfer_queue.codec import apply_parser

            columns = apply_parser(columns, parser)
        extent = self._store(block_id, Draft(columns).to_array(), keep=True)
        return extent, None if parser is None else heads_of(columns)

    def _store(self, block_id: str, data: np.ndarray, keep: bool) -> Extent | None:
        room = None if self._arena is None else self._arena.write(block_id, data.nbytes)
        if room is None:
            # What came in a message lies in memory of Ray's that has to become free again.
            self._private[block_id] = _read_only(data if keep else data.copy())
            return None
        extent, target = room
        target[:] = data
        return extent

    def read(self, blocks: Sequence[tuple[str, Extent | None]], cells: Cells) -> np.ndarray | None:
        """A block of the cells, see `StorageClient.read`; None when one is gone."""
        columns = self.columns(blocks, cells)
        return None if columns is None else Draft(columns).to_array()

    def columns(self, blocks: Sequence[tuple[str, Extent | None]], cells: Cells) -> dict[str, Column] | None:
        """`read` without packing; what is a view of a stored block is read-only."""
        needed = {number for which, _ in cells.values() for number in np.unique(which).tolist()}
        views: list[BlockView | None] = [None] * len(blocks)
        for number in needed:
            data = self._bytes_of(*blocks[number])
            if data is None:
                return None
            views[number] = BlockView(data)
        columns = {}
        for name, (which, places) in cells.items():
            runs = runs_of(which, places)
            if not blocks_hold(views, name, runs):
                return None
            columns[name] = gather(views, name, runs)
        return columns

    def _bytes_of(self, block_id: str, extent: Extent | None) -> np.ndarray | None:
        if extent is None:
            return self._private.get(block_id)
        return None if self._arena is None else self._arena.read(extent)

    def free(self, block_ids: Iterable[str]) -> None:
        """Forget these blocks; unknown ones are ignored."""
        shared = [block_id for block_id in block_ids if self._private.pop(block_id, None) is None]
        if self._arena is not None:
            self._arena.free(shared)

    # -- care --------------------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Give back unused memory; the names of writers whose process has ended."""
        if self._arena is None:
            return []
        self._arena.tidy()
        holding = self._arena.writers()
        self._writers = {name: process for name, process in self._writers.items() if name in holding}
        return [name for name, (pid, start) in self._writers.items() if start_of_process(pid) != start]

    def abandon(self, writer: str, live: Sequence[str]) -> None:
        """Take back the segments of a writer that is gone; `live` are its blocks with cells."""
        if self._arena is not None:
            self._arena.abandon(writer, live)

    def stats(self) -> dict[str, int]:
        """See `StorageHost.stats`."""
        shared = {} if self._arena is None else self._arena.stats()
        private = list(self._private.values())
        return {**shared, "private_blocks": len(private), "private_bytes": sum(data.nbytes for data in private)}

    # -- files -------------------------------------------------------------------------------------

    def export_blocks(self, blocks: Sequence[tuple[str, Extent | None]], path: str) -> list[FileEntry]:
        """See `StorageHost.export_blocks`."""
        entries, position = [], 0
        with Path(path).open("wb") as file:
            for block_id, extent in blocks:
                data = self._bytes_of(block_id, extent)
                if data is None:
                    raise StorageKeyNotFoundError(f"block {block_id} was freed before it could be written to {path}")
                file.write(data.data)
                entries.append((block_id, position, data.nbytes, zlib.crc32(data.data)))
                position += data.nbytes
            file.flush()
            os.fsync(file.fileno())
        return entries

    def import_blocks(self, path: str, entries: Sequence[FileEntry]) -> dict[str, Extent | None]:
        """See `StorageHost.import_blocks`."""
        extents = {}
        with Path(path).open("rb") as file:
            for block_id, position, nbytes, crc in entries:
                file.seek(position)
                data = file.read(nbytes)
                if len(data) != nbytes or zlib.crc32(data) != crc:
                    raise CheckpointError(
                        f"{path} is damaged: block {block_id} at byte {position} does not have its checksum. Take "
                        "another checkpoint, or the file from a backup"
                    )
                extents[block_id] = self._store(block_id, np.frombuffer(data, np.uint8), keep=True)
        return extents


def _read_only(data: np.ndarray) -> np.ndarray:
    data.flags.writeable = False
    return data
