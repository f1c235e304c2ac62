"""A bucket in the memory of a GPU, lent to another process on the same device by a CUDA IPC handle.

The handle travels as text in the place of a path, so that `open_bucket` and every server take both alike. The sender
keeps the memory until the server has answered for the bucket. PyTorch's allocator must not use expandable segments for
it (`PYTORCH_CUDA_ALLOC_CONF`): their memory cannot be exported.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlflow.utils.errors import WeightSyncError

PREFIX = "cuda-ipc:"


class DeviceSegment:
    """A uint8 buffer on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer: Tensor | None = None

    @property
    def path(self) -> str:
        """What `open_handle` takes in the other process."""
        assert self._buffer is not None
        handle = self._buffer.untyped_storage()._share_cuda_()
        return PREFIX + json.dumps([_to_text(part) for part in handle])

    def view(self, size: int) -> Tensor:
        """At least `size` bytes."""
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._buffer

    def seal(self) -> None:
        """What was written is there when another process reads."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Free the memory. May be called twice."""
        self._buffer = None


@contextmanager
def open_handle(path: str) -> Iterator[Tensor]:
    """The buffer of another process, uint8, valid inside the block.

    Raises:
        WeightSyncError: the handle cannot be opened here.
    """
    parts = [_from_text(part) for part in json.loads(path.removeprefix(PREFIX))]
    try:
        storage: Any = torch.UntypedStorage._new_shared_cuda(*parts)
    except RuntimeError as error:
        raise WeightSyncError(
            f"The rollout server cannot open the trainer's GPU memory ({error}). Both processes must see the same "
            "device, and PYTORCH_CUDA_ALLOC_CONF must not ask for expandable_segments."
        ) from error
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    try:
        yield flat
    finally:
        torch.cuda.synchronize(flat.device)
        del flat, storage
        torch.cuda.ipc_collect()


def _to_text(part: Any) -> Any:
    return {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part


def _from_text(part: Any) -> Any:
    return base64.b64decode(part["bytes"]) if isinstance(part, dict) else part
