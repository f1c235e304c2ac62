"""Memory that two processes of a node share, and the tensors of a bucket in it.

Invariants
    - The memory has no name in any file system: it is a `memfd`, opened by the server through the sender's
      descriptor (`/proc/<pid>/fd/<n>`, same user). When both processes are done, or dead, the kernel frees it:
      nothing can leak, not even after SIGKILL. Where the system has no `memfd`, a file in /dev/shm (else the
      temporary folder) is used, removed when the transfer ends.
    - A reader never changes it: it maps the bytes privately.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rlflow.checkpoint_engine import cuda_ipc
from rlflow.checkpoint_engine.checksum import tensor_digest
from rlflow.checkpoint_engine.receipt import TensorMeta, some
from rlflow.utils.errors import WeightSyncError


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

    def seal(self) -> None:
        """What was written is there when another process reads: nothing to do for memory of the host."""

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


def make_segment(label: str, device: torch.device) -> Segment | cuda_ipc.DeviceSegment:
    """Memory for tensors of that device."""
    return cuda_ipc.DeviceSegment(device) if device.type == "cuda" else Segment(label)


@contextlib.contextmanager
def open_bucket(path: str, metas: list[TensorMeta], *, verify: bool = True) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors of a bucket as views into the sender's memory (or a file), valid inside the `with` block.

    Args:
        path: of `Segment`, of a file, or a CUDA IPC handle.
        metas: whole tensors.
        verify: compare each tensor with the digest in its meta, where there is one.

    Raises:
        WeightSyncError: the memory cannot be opened, or does not hold what the metas say; names the tensors.
    """
    opened = cuda_ipc.open_handle(path) if path.startswith(cuda_ipc.PREFIX) else _mapped(path, metas)
    with opened as flat:
        tensors = [(meta.name, _tensor(flat, meta)) for meta in metas]
        if verify:
            check_digests(metas, tensors)
        yield tensors
        tensors.clear()  # views must not outlive the memory


def check_digests(metas: list[TensorMeta], tensors: list[tuple[str, Tensor]]) -> None:
    """Raises:
    WeightSyncError: names the tensors whose bytes are not those that were sent.
    """
    wrong = [
        meta.name
        for meta, (name, tensor) in zip(metas, tensors, strict=True)
        if meta.digest is not None and tensor_digest(name, tensor) != meta.digest
    ]
    if wrong:
        raise WeightSyncError(
            f"{len(wrong)} tensors arrived with other bytes than were sent: {some(wrong)}.", tensors=tuple(wrong)
        )


def _tensor(flat: Tensor, meta: TensorMeta) -> Tensor:
    part = flat[meta.offset : meta.offset + meta.size]
    dtype = getattr(torch, meta.dtype)
    if part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(meta.shape)


@contextlib.contextmanager
def _mapped(path: str, metas: list[TensorMeta]) -> Iterator[Tensor]:
    try:
        fd = os.open(path, os.O_RDONLY)
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
        mapped = mmap.mmap(fd, max(needed, 1) if size else 0, access=mmap.ACCESS_COPY) if size else None
    finally:
        os.close(fd)
    if mapped is None:
        yield torch.empty(0, dtype=torch.uint8)
        return
    flat = torch.frombuffer(mapped, dtype=torch.uint8)
    try:
        yield flat
    finally:
        del flat
        with contextlib.suppress(BufferError):  # a view outlives the block only after an exception
            mapped.close()
