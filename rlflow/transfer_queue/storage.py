"""Where cells live.

A backend has two sides. The `StorageHost` lives beside the controller: it creates the units and frees what has no live
cell any more. Its `endpoint` travels to each client, which makes a `StorageClient` of it to write and read blocks.

Invariants
    - A block is written once and never changed. It is freed as a whole, when none of its cells is in a row any more.
    - A unit copies what it is given, so it pins no shared memory and no message buffer.

`SimpleStorage` keeps blocks in Ray actors; `Local` keeps them in the process of the table (one process, no Ray).
Others are added with `register_storage_backend`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlflow.transfer_queue.column import Column, FieldHead, gather, head_of, owned
from rlflow.transfer_queue.meter import unit_class_for
from rlflow.transfer_queue.ports import RayPort
from rlflow.utils.errors import ConfigError

Garbage = Mapping[int, Sequence[str]]
Cells = dict[str, tuple[np.ndarray, np.ndarray]]
DataParser = Callable[[dict[str, list[Any]]], dict[str, Any]]


class StorageUnit:
    """Blocks in memory: {block id: {field: column}}."""

    def __init__(self) -> None:
        self._blocks: dict[str, dict[str, Column]] = {}

    def write(
        self, block_id: str, columns: dict[str, Column], parser: DataParser | None = None
    ) -> dict[str, FieldHead] | None:
        """Store a block. Returns the heads of its columns if a parser has changed them."""
        if parser is not None:
            from rlflow.transfer_queue.codec import apply_parser

            columns = apply_parser(columns, parser)
        self._blocks[block_id] = {name: owned(column) for name, column in columns.items()}
        return None if parser is None else {name: head_of(column) for name, column in columns.items()}

    def read(self, block_ids: Sequence[str], cells: Cells) -> dict[str, Column] | None:
        """One column a field: row i comes from `block_ids[cells[field][0][i]]`, place `cells[field][1][i]`.

        None when a needed cell is gone: it was overwritten or cleared after the reader had asked the controller.
        """
        result = {}
        for name, (which, places) in cells.items():
            used = np.unique(which)
            columns = {int(i): self._blocks.get(block_ids[int(i)], {}).get(name) for i in used}
            if any(column is None for column in columns.values()):
                return None
            dense = [column for column in columns.values() if column is not None]
            result[name] = gather(dense, np.searchsorted(used, which), places)
        return result

    def free(self, block_ids: Sequence[str]) -> None:
        """Forget these blocks; unknown ones are ignored."""
        for block_id in block_ids:
            self._blocks.pop(block_id, None)

    def stats(self) -> dict[str, int]:
        """Number of blocks and bytes held."""
        columns = [column for block in self._blocks.values() for column in block.values()]
        return {"blocks": len(self._blocks), "bytes": sum(column.data.nbytes for column in columns)}


class StorageHost(ABC):
    """The controller's side of a backend."""

    @property
    @abstractmethod
    def endpoint(self) -> Any:
        """What a client needs to reach the units; must survive pickling unless the backend is process-local."""

    @abstractmethod
    def free(self, garbage: Garbage) -> None:
        """Free blocks, {unit: [block id]}, without waiting."""

    def watch_units(self, on_lost: Callable[[int, str], None]) -> None:
        """Call `on_lost(unit, reason)` on the running event loop when a unit is gone."""

    @abstractmethod
    async def stats(self) -> list[dict[str, int]]:
        """`StorageUnit.stats` of each unit, after all that was freed so far."""


class StorageClient(ABC):
    """A client's side of a backend. Methods may be awaited on any event loop."""

    @property
    @abstractmethod
    def unit_count(self) -> int:
        """Number of units; a block lives in one of them."""

    @abstractmethod
    async def write(
        self, unit: int, block_id: str, columns: dict[str, Column], parser: DataParser | None
    ) -> dict[str, FieldHead] | None:
        """See `StorageUnit.write`."""

    @abstractmethod
    async def read(self, unit: int, block_ids: Sequence[str], cells: Cells) -> dict[str, Column] | None:
        """See `StorageUnit.read`."""

    @abstractmethod
    def discard(self, unit: int, block_id: str) -> None:
        """Free a block that was never committed, without waiting."""


_BACKENDS: dict[str, tuple[Callable[..., StorageHost], Callable[..., StorageClient]]] = {}


def register_storage_backend(name: str, host: Callable[..., StorageHost], client: Callable[..., StorageClient]) -> None:
    """Add a backend for `transfer_queue.backend.storage_backend=name`.

    Args:
        name: the config value.
        host: called as `host(config: dict, placements: list[str | None])` beside the controller.
        client: called as `client(endpoint, timeout_s)` in each process.
    """
    _BACKENDS[name] = (host, client)


def storage_backend(name: str) -> tuple[Callable[..., StorageHost], Callable[..., StorageClient]]:
    """Host and client factory of a backend; `ConfigError` for an unknown name."""
    if name not in _BACKENDS:
        raise ConfigError(
            f"transfer_queue.backend.storage_backend={name!r} is not available here; try one of {', '.join(_BACKENDS)}"
        )
    return _BACKENDS[name]


# -- SimpleStorage: Ray actors ---------------------------------------------------------------------


class SimpleStorageHost(StorageHost):
    """Creates one Ray actor a unit. They belong to the controller's process and go when it goes."""

    def __init__(self, config: dict[str, Any], placements: Sequence[str | None]) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # num_cpus=0: the units move bytes and must not take a core from the scheduler's account.
        unit_class = ray.remote(num_cpus=0, max_restarts=0)(unit_class_for(config, StorageUnit))
        # The session in the name keeps a new table's units apart from those of one that is just being torn down.
        suffix = str(ray.get_runtime_context().get_actor_id())[:12]
        self._timeout_s = float(config["rpc_timeout_s"])
        self._units: list[Any] = []
        for number, node_id in enumerate(placements):
            options: dict[str, Any] = {"name": f"TransferQueueStorageUnit#{number}@{suffix}"}
            if node_id is not None:
                options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=True)
            self._units.append(unit_class.options(**options).remote())

    @property
    def endpoint(self) -> Any:
        return self._units

    def free(self, garbage: Garbage) -> None:
        for unit, blocks in garbage.items():
            self._units[unit].free.remote(list(blocks))

    async def stats(self) -> list[dict[str, int]]:
        ports = [
            RayPort(unit, f"TransferQueue storage unit {i}", self._timeout_s) for i, unit in enumerate(self._units)
        ]
        return await asyncio.gather(*(port.call("stats") for port in ports))


class SimpleStorageClient(StorageClient):
    """Talks to the unit actors."""

    def __init__(self, endpoint: Sequence[Any], timeout_s: float) -> None:
        self._units = [
            RayPort(handle, f"TransferQueue storage unit {number}", timeout_s) for number, handle in enumerate(endpoint)
        ]

    @property
    def unit_count(self) -> int:
        return len(self._units)

    async def write(
        self, unit: int, block_id: str, columns: dict[str, Column], parser: DataParser | None
    ) -> dict[str, FieldHead] | None:
        return await self._units[unit].call("write", block_id, columns, parser)

    async def read(self, unit: int, block_ids: Sequence[str], cells: Cells) -> dict[str, Column] | None:
        return await self._units[unit].call("read", list(block_ids), cells)

    def discard(self, unit: int, block_id: str) -> None:
        self._units[unit].notify("free", [block_id])


# -- Local: this process ---------------------------------------------------------------------------


class LocalStorageHost(StorageHost):
    """One unit in this process."""

    def __init__(self, config: dict[str, Any], placements: Sequence[str | None]) -> None:
        self._unit = unit_class_for(config, StorageUnit)()

    @property
    def endpoint(self) -> Any:
        return self._unit

    def free(self, garbage: Garbage) -> None:
        for blocks in garbage.values():
            self._unit.free(blocks)

    async def stats(self) -> list[dict[str, int]]:
        return [self._unit.stats()]

    def placement(self):
        return [{"unit": 0, "node": None, "alive": True}]

    async def export_blocks(self, unit, blocks, path):
        import zlib
        from rlflow.transfer_queue.objects import pack
        out, pos = [], 0
        with open(path, "wb") as f:
            for b, _ in blocks:
                d = pack({n: [c.dtype, c.data, c.sizes, c.shapes, c.ragged] for n, c in self._unit._blocks[b].items()})
                f.write(d)
                out.append((b, pos, len(d), zlib.crc32(d)))
                pos += len(d)
        return out

    async def import_blocks(self, unit, path, entries):
        import zlib
        from rlflow.transfer_queue.objects import unpack
        from rlflow.utils.errors import CheckpointError
        with open(path, "rb") as f:
            for b, pos, n, crc in entries:
                f.seek(pos)
                d = f.read(n)
                if zlib.crc32(d) != crc:
                    raise CheckpointError("damaged")
                self._unit._blocks[b] = {n: Column(*c) for n, c in unpack(d).items()}
        return {e[0]: None for e in entries}


class LocalStorageClient(StorageClient):
    """Calls the unit directly. Single dict operations are atomic, so callers of several threads need no lock."""

    def __init__(self, endpoint: StorageUnit, timeout_s: float) -> None:
        self._unit = endpoint

    @property
    def unit_count(self) -> int:
        return 1

    async def write(
        self, unit: int, block_id: str, columns: dict[str, Column], parser: DataParser | None
    ) -> dict[str, FieldHead] | None:
        return self._unit.write(block_id, columns, parser)

    async def read(self, unit: int, block_ids: Sequence[str], cells: Cells) -> dict[str, Column] | None:
        return self._unit.read(block_ids, cells)

    def discard(self, unit: int, block_id: str) -> None:
        self._unit.free([block_id])


register_storage_backend("SimpleStorage", SimpleStorageHost, SimpleStorageClient)
register_storage_backend("Local", LocalStorageHost, LocalStorageClient)
