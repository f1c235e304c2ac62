"""`disk`: the trainer writes safetensors files into a folder that all nodes see; servers map them.

    <folder>/weights-000000007/00000.safetensors ...        one file a bucket
                              /index.json                   names, types, places, digests

Invariants
    - A folder of a version appears by one rename, whole. What a killed trainer left has a name that begins with a dot
      and is removed by the next write.
    - Nothing is fsynced: the files are a transport, and after a power failure the next sync writes new ones.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

from torch import Tensor

from rlflow.checkpoint.shards import write_tensors
from rlflow.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry, StoredBucket, exhaust
from rlflow.checkpoint_engine.checksum import tensor_digest, type_name
from rlflow.checkpoint_engine.receipt import TensorMeta
from rlflow.checkpoint_engine.segments import open_bucket
from rlflow.utils.errors import ConfigError, WeightSyncError

_INDEX = "index.json"
_DONE, _WRITING = "weights-", ".weights-"


@CheckpointEngineRegistry.register("disk")
class DiskCheckpointEngine(CheckpointEngine):
    """See the module.

    Args:
        bucket_size: bytes of a file, and of host memory that a write holds.
        is_master: trainer rank 0, which writes.
        folder: of all versions; on a file system that every node of the run sees.
        keep: versions that stay.
    """

    streams = False

    def __init__(self, bucket_size: int, is_master: bool = False, folder: str | None = None, keep: int = 1) -> None:
        if not folder:
            raise ConfigError(
                "checkpoint_engine.backend=disk needs a folder that all nodes see: set "
                "rollout.checkpoint_engine.engine_kwargs.disk.folder=/path"
            )
        if keep < 1:
            raise ConfigError(f"rollout.checkpoint_engine.engine_kwargs.disk.keep={keep} must be at least 1")
        self._bucket, self._is_master, self._keep = bucket_size, is_master, keep
        self._folder = Path(folder).expanduser().absolute()

    def prepare(self) -> dict[str, Any]:
        """The master makes the folder and removes what a killed one left half written."""
        if self._is_master:
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in self._folder.glob(f"{_WRITING}*"):
                shutil.rmtree(left, ignore_errors=True)
        return {}

    @classmethod
    def build_topology(
        cls, actor_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """There is no group."""
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        """There is no group."""

    def finalize(self) -> None:
        if self._is_master:
            for old in sorted(self._folder.glob(f"{_DONE}*"))[: -self._keep]:
                shutil.rmtree(old, ignore_errors=True)

    # ---- writing -------------------------------------------------------------------------------------------------

    async def send_weights(
        self, weights: Iterator[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float] | None:
        weights = iter(weights)
        if not self._is_master:
            exhaust(weights)
            return None
        version = int(global_steps or 0)
        writing = self._folder / f"{_WRITING}{version:09d}-{secrets.token_hex(4)}"
        try:
            writing.mkdir(parents=True)
            files = _write(writing, weights, self._bucket)
            done = self._of(version)
            shutil.rmtree(done, ignore_errors=True)
            os.replace(writing, done)
        finally:
            shutil.rmtree(writing, ignore_errors=True)
            exhaust(weights)
        return {"files": float(files)}

    # ---- reading -------------------------------------------------------------------------------------------------

    def stored_buckets(self, global_steps: int | None = None) -> list[StoredBucket]:
        """The files of a version, each with what lies where in it.

        Raises:
            WeightSyncError: there is no whole version of that number.
        """
        folder = self._of(int(global_steps or 0))
        try:
            index = json.loads((folder / _INDEX).read_text())
        except (OSError, ValueError) as error:
            raise WeightSyncError(f"{folder} holds no weights that can be read here: {error}") from error
        return [
            ([TensorMeta(name, tuple(shape), *rest) for name, shape, *rest in rows], str(folder / file))
            for file, rows in index.items()
        ]

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        for metas, path in self.stored_buckets(global_steps):
            with open_bucket(path, metas) as tensors:
                for name, tensor in tensors:
                    yield name, tensor

    def _of(self, version: int) -> Path:
        return self._folder / f"{_DONE}{version:09d}"


def _write(folder: Path, weights: Iterator[tuple[str, Tensor]], bucket: int) -> int:
    """Files of at most `bucket` bytes (or one tensor) and their index; returns how many."""
    index: dict[str, list[tuple[Any, ...]]] = {}
    held: dict[str, Tensor] = {}
    names: set[str] = set()
    size = 0

    def flush() -> None:
        nonlocal held, size
        if not held:
            return
        file = f"{len(index):05d}.safetensors"
        write_tensors(held, folder / file)
        index[file] = [astuple(meta) for meta in _metas(folder / file, held)]
        held, size = {}, 0

    for name, tensor in weights:
        if name in names:
            raise WeightSyncError(f"The trainer exports {name!r} twice.", tensors=(name,))
        names.add(name)
        nbytes = tensor.numel() * tensor.element_size()
        if size + nbytes > bucket:
            flush()
        # A copy: on one rank an exported tensor may share the memory of another.
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += nbytes
    flush()
    (folder / _INDEX).write_text(json.dumps(index))
    return len(index)


def _metas(path: Path, tensors: dict[str, Tensor]) -> list[TensorMeta]:
    """Where safetensors put the tensors of a file."""
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    metas = []
    for name, tensor in tensors.items():
        begin, end = header[name]["data_offsets"]
        digest = tensor_digest(name, tensor)
        offset = 8 + length + begin
        metas.append(TensorMeta(name, tuple(tensor.shape), type_name(tensor.dtype), 0, end - begin, offset, digest))
    return metas
