"""The `Local` backend: blocks in the memory of this process, for one-process use and tests. No Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.transfer_queue.column import Column
from rlflow.transfer_queue.meter import unit_class_for
from rlflow.transfer_queue.storage import (
    Cells,
    DataParser,
    Extent,
    FileEntry,
    Garbage,
    Place,
    StorageClient,
    StorageHost,
    Written,
    register_storage_backend,
)
from rlflow.transfer_queue.storage_unit import StorageUnit


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

    def placement(self) -> list[dict[str, Any]]:
        return [{"unit": 0, "node": None, "alive": True}]

    async def export_blocks(self, unit: int, blocks: Sequence[tuple[str, Extent | None]], path: str) -> list[FileEntry]:
        return self._unit.export_blocks(blocks, path)

    async def import_blocks(self, unit: int, path: str, entries: Sequence[FileEntry]) -> dict[str, Extent | None]:
        return self._unit.import_blocks(path, entries)


class LocalStorageClient(StorageClient):
    """Calls the unit directly. Single dict operations are atomic, so callers of several threads need no lock."""

    def __init__(self, endpoint: StorageUnit, timeout_s: float, writer: str) -> None:
        self._unit = endpoint

    async def write(self, block_id: str, columns: Mapping[str, Column], parser: DataParser | None) -> Written:
        extent, heads = self._unit.write_columns(block_id, columns, parser)
        return Written(0, extent, heads)

    async def read(self, blocks: Sequence[Place], cells: Cells) -> dict[str, Column] | None:
        return self._unit.columns([(block_id, extent) for _, block_id, extent in blocks], cells)

    def discard(self, unit: int, block_id: str) -> None:
        self._unit.free([block_id])

    def blocking(self) -> LocalStorageClient:
        return self


register_storage_backend("Local", LocalStorageHost, LocalStorageClient)
