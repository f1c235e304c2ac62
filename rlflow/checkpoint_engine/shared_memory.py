"""Weights between processes of one node through shared memory.

The leader rank packs tensors into a memory file and tells the server where they lie; the server maps the same pages
and copies them into its parameters. Two files take turns, so that one is filled while the other is loaded.

Invariants
    - The memory has no name in any file system: it is a `memfd`, opened by the server through the sender's
      descriptor (`/proc/<pid>/fd/<n>`, same user). When both processes are done, or dead, the kernel frees it:
      nothing can leak, not even after SIGKILL. Where the system has no `memfd`, a file in /dev/shm (else the
      temporary folder) is used, removed when the transfer ends.
    - A file is filled again only after the server has answered for it.
    - Floating-point tensors travel in `rollout.dtype`; the checksum covers exactly the bytes that travel.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.checkpoint_engine.base import TensorMeta, WeightReceipt, WeightSender
from rlflow.checkpoint_engine.checksum import combine, tensor_digest
from rlflow.utils.errors import WeightSyncError
from rlflow.utils.ray_utils import ray_await

logger = logging.getLogger(__name__)

_ALIGN = 64  # bytes; views of any type start on their own alignment
_DEFAULT_TIMEOUT_S = 300.0
_WIRE_TYPES = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float32": torch.float32, "fp32": torch.float32}


class Segment:
    """A memory file of the sending process."""

    def __init__(self, label: str) -> None:
        self._unlink: Path | None = None
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create(label)
            self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        else:
            folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())  # noqa: S108
            self._unlink = folder / f"{label}-{secrets.token_hex(8)}"
            self._fd = os.open(self._unlink, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            self.path = str(self._unlink)
        self._map: mmap.mmap | None = None
        self._view: Tensor | None = None
        self.size = 0

    def view(self, size: int) -> Tensor:
        """At least `size` bytes of the file, uint8; pages come into being when they are written."""
        if size > self.size:
            self._view = None
            if self._map is not None:
                self._map.close()
            os.ftruncate(self._fd, size)
            self._map, self.size = mmap.mmap(self._fd, size), size
        if self._view is None:
            assert self._map is not None
            self._view = torch.frombuffer(self._map, dtype=torch.uint8)
        return self._view

    def close(self) -> None:
        """Free the memory. May be called twice."""
        self._view = None
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a view is still referenced: the map goes with it
                self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._unlink is not None:
            self._unlink.unlink(missing_ok=True)
            self._unlink = None


@contextlib.contextmanager
def open_bucket(path: str, metas: list[TensorMeta]) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors of a bucket as views into the sender's memory, valid inside the `with` block.

    Raises:
        WeightSyncError: the memory cannot be opened, or does not hold what the metas say.
    """
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError as error:
        raise WeightSyncError(
            f"The rollout server cannot open the trainer's shared memory {path} ({error}). Both processes must run "
            "on one node under one user, and see each other's /proc; or the trainer's process has died."
        ) from error
    try:
        size = os.fstat(fd).st_size
        needed = max((meta.offset + meta.size for meta in metas), default=0)
        if needed > size:
            raise WeightSyncError(f"The bucket {path} has {size} bytes; its tensors need {needed}.")
        mapped = mmap.mmap(fd, size)
    finally:
        os.close(fd)
    flat = torch.frombuffer(mapped, dtype=torch.uint8)
    try:
        yield [(m.name, flat[m.offset : m.offset + m.size].view(getattr(torch, m.dtype)).view(m.shape)) for m in metas]
    finally:
        del flat
        with contextlib.suppress(BufferError):  # a view outlives the block only after an exception
            mapped.close()


class SharedMemorySender(WeightSender):
    """See the module.

    Args:
        rollout_config: reads `dtype`, `checkpoint_engine.update_weights_bucket_megabytes`, `request_timeout_s`.
        rank: of this trainer process; for the label of its memory and for messages.
    """

    def __init__(self, rollout_config: Any, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._wire_type = _WIRE_TYPES[str(rollout_config.dtype)]
        self._bucket_bytes = int(rollout_config.checkpoint_engine.update_weights_bucket_megabytes * 2**20)
        self._timeout_s = float(rollout_config.get("request_timeout_s", None) or _DEFAULT_TIMEOUT_S)

    async def send(self, params: Iterator[tuple[str, Tensor]], server: Any, version: int) -> WeightReceipt | None:
        if server is None:
            for _ in params:  # gathering a tensor is collective
                pass
            return None
        started = time.perf_counter()
        label = f"rlflow-weights-v{version}-r{self._rank}"
        stream = _BucketStream(server, (Segment(label), Segment(label)), self._bucket_bytes, self._timeout_s)
        digests: list[int] = []
        names: set[str] = set()
        total = 0
        try:
            await ray_await(
                server.begin_update.remote(version),
                what="the rollout server to take weights",
                timeout_s=self._timeout_s,
            )
            for name, tensor in params:
                if name in names:
                    raise WeightSyncError(f"The trainer exports {name!r} twice.")
                names.add(name)
                wire = self._to_wire(tensor)
                digests.append(tensor_digest(name, wire))
                total += wire.numel() * wire.element_size()
                await stream.put(name, wire)
            await stream.flush()
            checksum = combine(digests)
            got = await ray_await(
                server.finish_update.remote(version, len(digests), checksum),
                what=f"the receipt of weight version {version} for rank {self._rank}",
                timeout_s=self._timeout_s,
            )
        except WeightSyncError as error:
            # From a remote call it comes wrapped, with the server's traceback for its text.
            cause = getattr(error, "cause", None)
            raise (cause if isinstance(cause, WeightSyncError) else error) from None
        finally:
            stream.close()
        seconds = time.perf_counter() - started
        sent = WeightReceipt(version, len(digests), total, checksum, seconds, f"trainer rank {self._rank}")
        sent.require_same(got)
        return replace(got, seconds=seconds)

    def _to_wire(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.is_floating_point():
            tensor = tensor.to(self._wire_type)
        return tensor.cpu().contiguous()


class _BucketStream:
    """Packs tensors into two segments in turn; at most one bucket is with the server while the other is filled."""

    def __init__(self, server: Any, segments: tuple[Segment, Segment], bucket_bytes: int, timeout_s: float) -> None:
        self._server, self._segments = server, segments
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._turn = 0
        self._metas: list[TensorMeta] = []
        self._used = 0
        self._pending: asyncio.Task[Any] | None = None

    async def put(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, first sending the bucket if it does not fit. One larger than a bucket gets its own."""
        size = tensor.numel() * tensor.element_size()
        if self._metas and self._used + size > self._bucket_bytes:
            await self._ship()
        view = self._segments[self._turn].view(max(self._bucket_bytes, size))
        offset = self._used
        if size:
            view[offset : offset + size].copy_(tensor.reshape(-1).view(torch.uint8))
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._metas.append(TensorMeta(name, tuple(tensor.shape), dtype, offset, size))
        self._used = -(-(offset + size) // _ALIGN) * _ALIGN

    async def flush(self) -> None:
        """Send what is left and wait until all of it is loaded."""
        if self._metas:
            await self._ship()
        await self._settle()

    async def _ship(self) -> None:
        await self._settle()
        metas, path = self._metas, self._segments[self._turn].path
        self._pending = asyncio.create_task(
            ray_await(
                self._server.load_bucket.remote(metas, path),
                what=f"the rollout server to load {len(metas)} tensors",
                timeout_s=self._timeout_s,
            )
        )
        self._turn, self._metas, self._used = 1 - self._turn, [], 0

    async def _settle(self) -> None:
        """Wait until the server is done with the bucket that is under way."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            await pending

    def close(self) -> None:
        """Free the memory; called when the server has answered for all of it, or after an error."""
        if self._pending is not None:
            self._pending.cancel()
        for segment in self._segments:
            segment.close()
