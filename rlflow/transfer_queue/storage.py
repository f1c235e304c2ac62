"""Where cells live: the interface of storage backends, and which there are.

A backend has two sides. The `StorageHost` lives beside the controller: it creates the units, watches over them and
frees blocks without a live cell. Its `endpoint` travels to each process, which makes a `StorageClient` of it to write
and read blocks. The controller only sees unit numbers, block ids and *extents* (plain integers that say where in a unit
a block is).

What a backend must keep
    - A block is written once and never changed. It is freed as a whole, when none of its cells is in a row any more.
    - `read` gives every cell as it was written, or None when a block was freed in the meantime: the client then asks
      the controller again. What it returns is the reader's own: writable arrays (`Column.data`), or read-only ones,
      which the client copies.
    - Readers may go on reading what they got, however long, whatever happens to the block.
    - Every remote call has a deadline. A unit that is gone for good is reported by `UnitGoneError`, and new blocks go
      to the units that are left.
    - No column is looked into and nothing is unpickled: a block is bytes (see `block`).

| backend | module | where blocks are |
|---|---|---|
| `SimpleStorage` | `storage_simple` | Ray actors; shared memory on one machine, Ray's transport between machines |
| `Local` | `storage_local` | the memory of this process; no Ray |

A store of another kind (a cluster store as Mooncake, say) is one more `register_storage_backend`: one unit for the
whole store, a block written under its id, and as extent what the store wants back to find it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from rlflow.transfer_queue.column import Column, FieldHead
from rlflow.transfer_queue.errors import QueueUnavailableError
from rlflow.utils.errors import ConfigError

Extent = tuple[int, ...]
Place = tuple[int, str, Extent | None]  # unit, block id, extent
Cells = Mapping[str, tuple[np.ndarray, np.ndarray]]
Garbage = Mapping[int, Sequence[str]]
DataParser = Callable[[dict[str, list[Any]]], dict[str, Any]]
# A block in a file: its id, where it begins, how many bytes it has, their CRC-32.
FileEntry = tuple[str, int, int, int]


class Written(NamedTuple):
    """A written block: where it is, and the heads of its columns when a parser has changed them."""

    unit: int
    extent: Extent | None
    heads: dict[str, FieldHead] | None = None


class UnitGoneError(QueueUnavailableError):
    """A storage unit is gone for good, and with it what it held."""

    def __init__(self, message: str, unit: int = -1) -> None:
        super().__init__(message)
        self.unit = unit

    def __reduce__(self) -> tuple[Any, ...]:
        return UnitGoneError, (str(self), self.unit)


class StorageHost(ABC):
    """The controller's side of a backend. All methods are called on the controller's event loop."""

    @property
    @abstractmethod
    def endpoint(self) -> Any:
        """What a client needs to reach the units; must survive pickling unless the backend is process-local."""

    @abstractmethod
    def free(self, garbage: Garbage) -> None:
        """Free blocks, {unit: [block id]}, without waiting."""

    @abstractmethod
    async def stats(self) -> list[dict[str, int]]:
        """Memory of each unit, after all that was freed so far; {} for a unit that is gone.

        `segment_bytes`: memory taken for blocks, `free_bytes`: of these not in use, `pinned_bytes`: freed but still
        looked at by readers, `private_bytes`: blocks that are not in shared memory.
        """

    def watch_units(
        self, on_lost: Callable[[int, str], None], abandon: Callable[[str], Awaitable[Sequence[str]]]
    ) -> None:
        """Begin to watch over units and writers; to call again does nothing.

        Args:
            on_lost: called with a unit's number and the reason when the unit is gone for good.
            abandon: called with the name of a writer that is gone; refuses its later commits and returns the ids of
                its blocks with live cells.
        """

    def replace(self, unit: int) -> None:
        """A unit is gone: let a new one, with the next number, take its place, where the backend can."""

    @abstractmethod
    def placement(self) -> list[dict[str, Any]]:
        """{"unit", "node", "alive"} of each unit; more entries where the backend knows more."""

    @abstractmethod
    async def export_blocks(self, unit: int, blocks: Sequence[tuple[str, Extent | None]], path: str) -> list[FileEntry]:
        """Have a unit write blocks to a new file.

        Raises:
            StorageKeyNotFoundError: a block is not there any more.
        """

    @abstractmethod
    async def import_blocks(self, unit: int, path: str, entries: Sequence[FileEntry]) -> dict[str, Extent | None]:
        """Have a unit take in blocks from a file; returns where they are.

        Raises:
            CheckpointError: the file does not hold what the entries say.
        """


class StorageClient(ABC):
    """A process's side of a backend; usable from any thread and any event loop."""

    @abstractmethod
    async def write(self, block_id: str, columns: Mapping[str, Column], parser: DataParser | None) -> Written:
        """Write a block to a unit of the backend's choice, one that is near.

        Raises:
            UnitGoneError: a unit was found to be gone; the next call takes another one.
            QueueUnavailableError: there is no unit left.
        """

    @abstractmethod
    async def read(self, blocks: Sequence[Place], cells: Cells) -> dict[str, Column] | None:
        """One column a field: row i is row `cells[field][1][i]` of block `blocks[cells[field][0][i]]`.

        None when a block is gone: it was overwritten or cleared after the reader had asked the controller.

        Raises:
            UnitGoneError: a unit that holds some of the cells is gone.
        """

    @abstractmethod
    def discard(self, unit: int, block_id: str) -> None:
        """Free a block that was never committed, without waiting."""

    def forget_unit(self, unit: int) -> None:
        """The controller says that a unit is gone: write no more to it."""

    def knows(self, blocks: Sequence[Place]) -> bool:
        """Whether the units of these blocks are known here; else `meet` comes first."""
        return True

    def meet(self, endpoint: Any) -> None:
        """Learn of units that took the place of others, from what the host's `endpoint` says now."""

    @abstractmethod
    def blocking(self) -> StorageClient:
        """The same client with ports that block the thread, see `ports`."""

    def close(self) -> None:
        """The process leaves the table."""


HostFactory = Callable[..., StorageHost]
ClientFactory = Callable[..., StorageClient]

_HOMES = {"SimpleStorage": "storage_simple", "Local": "storage_local"}
_BACKENDS: dict[str, tuple[HostFactory, ClientFactory]] = {}


def register_storage_backend(name: str, host: HostFactory, client: ClientFactory) -> None:
    """Add a backend for `transfer_queue.backend.storage_backend=name`.

    Args:
        name: the config value.
        host: called as `host(config: dict, placements: list[str | None])` beside the controller; `config` is the merged
            `transfer_queue` config, of which `backend.<name>` belongs to the backend.
        client: called as `client(endpoint, timeout_s, writer)` in each process; the ids of the blocks that it is given
            to write begin with `writer`.
    """
    _BACKENDS[name] = (host, client)


def storage_backend(name: str) -> tuple[HostFactory, ClientFactory]:
    """Host and client factory of a backend; `ConfigError` for an unknown name."""
    if name not in _BACKENDS and name in _HOMES:
        import_module(f"rlflow.transfer_queue.{_HOMES[name]}")  # registers itself
    if name not in _BACKENDS:
        known = ", ".join(dict.fromkeys([*_HOMES, *_BACKENDS]))
        raise ConfigError(f"transfer_queue.backend.storage_backend={name!r} is not available here; try one of {known}")
    return _BACKENDS[name]
