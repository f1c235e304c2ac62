"""Tensors into buckets: two pieces of memory take turns, so that one is filled while the other is loaded.

Invariants
    - Memory is filled again only after the server has answered for it.
    - Cast, copy and checksum of a tensor are one pass over it, in blocks that fit into a cache.
"""

from __future__ import annotations

import asyncio
from typing import Any

from torch import Tensor

from rlflow.checkpoint_engine.checksum import combine, copy_with_digest, type_name
from rlflow.checkpoint_engine.receipt import BucketReceipt, TensorMeta
from rlflow.checkpoint_engine.segments import make_segment
from rlflow.checkpoint_engine.server_link import ServerLink
from rlflow.checkpoint_engine.wire import WireTypes
from rlflow.utils.errors import WeightSyncError

ALIGN = 64  # bytes; views of any type start on their own alignment
# A bucket of this size goes out as soon as the server is idle: both ends work at the same time then.
_EARLY_BYTES = 8 * 2**20


class BucketPacker:
    """Packs the tensors of one update and sends the buckets.

    Attributes:
        names: sent so far.
        digests, total_bytes: of all of them.
        buckets: receipts of the buckets that the server took.
    """

    def __init__(self, link: ServerLink, types: WireTypes, bucket_bytes: int, label: str) -> None:
        self._link, self._types, self._bucket_bytes, self._label = link, types, bucket_bytes, label
        self.names: set[str] = set()
        self.digests: list[int] = []
        self.total_bytes = 0
        self.buckets: list[BucketReceipt] = []
        self._segments: list[Any] = []
        self._turn = 0
        self._metas: list[TensorMeta] = []
        self._used = 0
        self._pending: asyncio.Task[None] | None = None

    async def put(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, first sending the bucket if it does not fit. One larger than a bucket gets its own."""
        if name in self.names:
            raise WeightSyncError(f"The trainer exports {name!r} twice.", tensors=(name,))
        self.names.add(name)
        dtype = self._types.of(name, tensor.dtype)
        size = tensor.numel() * dtype.itemsize
        if self._metas and self._used + size > self._bucket_bytes:
            await self._ship()
        if not self._segments:
            self._segments = [make_segment(self._label, tensor.device) for _ in range(2)]
        view = self._segments[self._turn].view(max(self._bucket_bytes, size))
        target = view[self._used : self._used + size].view(dtype)
        digest = copy_with_digest(name, tensor, target)
        self._metas.append(TensorMeta(name, tuple(tensor.shape), type_name(dtype), 0, size, self._used, digest))
        self.digests.append(digest)
        self.total_bytes += size
        self._used = -(-(self._used + size) // ALIGN) * ALIGN
        if self._used >= _EARLY_BYTES and await self._idle():
            await self._ship()

    async def flush(self) -> None:
        """Send what is left and wait until all of it is loaded."""
        if self._metas:
            await self._ship()
        await self._settle()

    async def _ship(self) -> None:
        await self._settle()
        metas, segment = self._metas, self._segments[self._turn]
        segment.seal()
        self._pending = asyncio.create_task(self._link.load(metas, segment.path))
        digests = [meta.digest for meta in metas if meta.digest is not None]
        self.buckets.append(BucketReceipt(len(metas), sum(meta.size for meta in metas), combine(digests)))
        self._turn, self._metas, self._used = 1 - self._turn, [], 0
        await asyncio.sleep(0)  # lets the call go out before the next tensor keeps this thread busy

    async def _idle(self) -> bool:
        await asyncio.sleep(0)
        return self._pending is None or self._pending.done()

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
