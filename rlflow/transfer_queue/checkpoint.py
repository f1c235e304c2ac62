"""Checkpoints of a table: a folder that is whole under its name, or the one before it.

```
<dir>/metadata.json             {"format", "storage_saved", "user_metadata", "state": {"nbytes", "crc32"}}; written last
<dir>/controller_state.msgpack  keys, tags, marks, lineage, and where in which file each block is
<dir>/simple_storage/su_0.blocks    the blocks of one storage unit, one after the other, as they are in its memory
```

Saving notes the table's metadata in one go, while the controller does nothing else, and then writes at leisure: blocks
never change, and the controller frees none of them until the files are there. So the checkpoint is the table of one
moment, and no writer waits longer than that. The folder is built as `<dir>.tmp`; the one it replaces is `<dir>.old` for
as long as the two renames take, and is put back if the process dies in between.

Restoring gives every block a new id and spreads the blocks over the storage units there are, however many there were.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.transfer_queue.errors import (
    IncompleteCheckpointError,
    QueueUnavailableError,
    StorageKeyNotFoundError,
    TableCheckpointError,
)
from rlflow.transfer_queue.objects import pack, unpack
from rlflow.transfer_queue.rows import Block
from rlflow.transfer_queue.snapshot import Home, Snapshot, State, encode
from rlflow.transfer_queue.storage import StorageHost
from rlflow.utils.disk import fsync_path
from rlflow.utils.errors import CheckpointError

FORMAT = 1
METADATA = "metadata.json"
STATE = "controller_state.msgpack"
STORAGE = "simple_storage"


@dataclass(slots=True)
class Loaded:
    """A checkpoint whose blocks are in storage.

    Attributes:
        state: the table's metadata, for `snapshot.thaw`.
        homes: where its blocks are.
        sampler: state of the sampler, None if there was none.
        user_metadata: what the caller of `save` added.
    """

    state: State
    homes: list[Home]
    sampler: Any
    user_metadata: Any


# -- saving ----------------------------------------------------------------------------------------


async def save(snapshot: Snapshot, host: StorageHost, final: Path, sampler: Any, user_metadata: Any) -> None:
    """Write a snapshot, whose blocks must stay in storage until this returns.

    Raises:
        TableCheckpointError: the disk is full or refuses, or a block cannot be had; an older checkpoint is untouched.
    """
    work = _beside(final, ".tmp")
    with _explained(final):
        await asyncio.to_thread(_begin, work, final)
    try:
        with _explained(final):
            places = await _export(snapshot.blocks, host, work / STORAGE)
            await asyncio.to_thread(_write_metadata, work, snapshot, places, sampler, user_metadata)
            await asyncio.to_thread(_replace, work, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _explained(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "; the disk is full" if error.errno == errno.ENOSPC else ""
        raise TableCheckpointError(f"the table's checkpoint {final} was not written{hint}: {error}") from error
    except (QueueUnavailableError, StorageKeyNotFoundError) as error:
        raise TableCheckpointError(
            f"the table's checkpoint {final} was not written, a storage unit failed meanwhile: {error}"
        ) from error


def _beside(final: Path, suffix: str) -> Path:
    return final.with_name(final.name + suffix)


def _begin(work: Path, final: Path) -> None:
    for folder in (work, final, _beside(final, ".old")):
        if folder.exists() and not _is_ours(folder):
            raise TableCheckpointError(
                f"the table's checkpoint {final} was not written: {folder}, which it would replace, holds something "
                "else than a checkpoint of a table. Give a folder of its own, or move that one"
            )
    recover(final)
    shutil.rmtree(work, ignore_errors=True)
    (work / STORAGE).mkdir(parents=True)


async def _export(blocks: Sequence[Block], host: StorageHost, folder: Path) -> list[list[Any]]:
    """Have each unit write its blocks; [file, offset, bytes, crc] of each block."""
    by_unit: dict[int, list[Block]] = {}
    for block in blocks:
        by_unit.setdefault(block.unit, []).append(block)
    replies = await asyncio.gather(
        *(
            host.export_blocks(unit, [(b.block_id, b.extent) for b in mine], str(folder / f"su_{unit}.blocks"))
            for unit, mine in by_unit.items()
        )
    )
    place_of = {}
    for unit, entries in zip(by_unit, replies, strict=True):
        for block_id, offset, nbytes, crc in entries:
            place_of[block_id] = [f"su_{unit}.blocks", offset, nbytes, crc]
    return [place_of[block.block_id] for block in blocks]


def _write_metadata(work: Path, snapshot: Snapshot, places: list[list[Any]], sampler: Any, user_metadata: Any) -> None:
    data = pack({**encode(snapshot), "places": places, "sampler": sampler})
    _write(work / STATE, data)
    metadata = {
        "format": FORMAT,
        "storage_saved": True,
        "user_metadata": user_metadata,
        "state": {"nbytes": len(data), "crc32": zlib.crc32(data)},
    }
    _write(work / METADATA, json.dumps(metadata, indent=1).encode())
    fsync_path(work / STORAGE)
    fsync_path(work)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    fsync_path(path)


def _replace(work: Path, final: Path) -> None:
    old = _beside(final, ".old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.rename(final, old)
    os.rename(work, final)
    fsync_path(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds nothing but (parts of) a checkpoint."""
    return folder.is_dir() and {METADATA, STATE, STORAGE}.issuperset(os.listdir(folder))


def recover(final: Path) -> None:
    """Put back the checkpoint that a killed save had set aside."""
    old = _beside(final, ".old")
    if not final.exists() and _is_ours(old):
        os.rename(old, final)


# -- loading ---------------------------------------------------------------------------------------


async def load(host: StorageHost, final: Path) -> Loaded:
    """Read a checkpoint and bring its blocks into storage. After an error nothing of it is left there.

    Raises:
        IncompleteCheckpointError: (a FileNotFoundError) files are missing.
        TableCheckpointError: files are damaged, or storage cannot take the blocks.
    """
    state, user_metadata = await asyncio.to_thread(_read, final)
    try:
        places, sampler = state.pop("places"), state.pop("sampler")
        plan = _spread(places, [unit["unit"] for unit in host.placement() if unit["alive"]])
    except (KeyError, TypeError, ValueError) as error:
        raise TableCheckpointError(f"{final / STATE} is no state of a table ({error!r})") from error
    writer = f"restored-{uuid.uuid4().hex[:16]}"
    homes: list[Home | None] = [None] * len(places)
    try:
        for (unit, name), numbers in plan.items():
            entries = [(f"{writer}:{number}", *places[number][1:]) for number in numbers]
            extents = await host.import_blocks(unit, str(final / STORAGE / name), entries)
            for number, (block_id, *_) in zip(numbers, entries, strict=True):
                homes[number] = Home(unit, block_id, extents[block_id])
    except BaseException as error:
        discard(host, [Home(unit, f"{writer}:{number}", None) for (unit, _), mine in plan.items() for number in mine])
        if isinstance(error, FileNotFoundError):
            raise IncompleteCheckpointError(f"the table's checkpoint {final} is incomplete: {error}") from error
        if isinstance(error, (OSError, CheckpointError, QueueUnavailableError)):
            raise TableCheckpointError(f"the table's checkpoint {final} cannot be restored: {error}") from error
        raise
    return Loaded(state, [home for home in homes if home is not None], sampler, user_metadata)


def discard(host: StorageHost, homes: Sequence[Home]) -> None:
    """Free restored blocks that no table uses."""
    garbage: dict[int, list[str]] = {}
    for home in homes:
        garbage.setdefault(home.unit, []).append(home.block_id)
    host.free(garbage)


def _spread(places: Sequence[Sequence[Any]], units: Sequence[int]) -> Mapping[tuple[int, str], list[int]]:
    """Numbers of the blocks that each unit takes from each file, so that all units get about as many bytes."""
    if places and not units:
        raise QueueUnavailableError("no storage unit is left to restore a checkpoint into")
    load = dict.fromkeys(units, 0)
    plan: dict[tuple[int, str], list[int]] = {}
    for number, (name, _, nbytes, _) in enumerate(places):
        unit = min(load, key=load.__getitem__)
        load[unit] += nbytes
        plan.setdefault((unit, os.path.basename(name)), []).append(number)
    return plan


def _read(final: Path) -> tuple[State, Any]:
    recover(final)
    missing = [name for name in (METADATA, STATE) if not (final / name).is_file()]
    if missing:
        raise IncompleteCheckpointError(
            f"{final} is no whole checkpoint of a table: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            "missing. Give the folder that save_checkpoint wrote; it must be visible from the controller's node"
        )
    try:
        metadata = json.loads((final / METADATA).read_text(encoding="utf-8"))
        version, expected = metadata["format"], (metadata["state"]["nbytes"], metadata["state"]["crc32"])
    except (ValueError, KeyError, TypeError) as error:
        raise TableCheckpointError(f"{final / METADATA} is damaged: {error!r}") from error
    if version != FORMAT:
        raise TableCheckpointError(f"{final} has format {version!r}, this version reads format {FORMAT}")
    data = (final / STATE).read_bytes()
    if (len(data), zlib.crc32(data)) != expected:
        raise TableCheckpointError(
            f"{final / STATE} is damaged: {len(data)} bytes, checksum {zlib.crc32(data)}, where {METADATA} names "
            f"{expected[0]} bytes, checksum {expected[1]}. Take another checkpoint"
        )
    return unpack(data), metadata.get("user_metadata")
