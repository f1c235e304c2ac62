"""Tensors into buckets: pieces of memory take turns, so that one is filled while others are loaded.

Invariants
    - Memory is filled again only after the server has answered for it.
    - Cast, copy and checksum of a tensor are one pass over it, in blocks that fit into a cache.
    - Memory of the host is reused while it is still in a cache that both processes see: buckets stay small.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rlflow.checkpoint_engine.checksum import combine, copy_with_digest, type_name
from rlflow.checkpoint_engine.cores import half_of_the_cores
from rlflow.checkpoint_engine.receipt import BucketReceipt, TensorMeta
from rlflow.checkpoint_engine.segments import Segment, make_segment
from rlflow.checkpoint_engine.server_link import ServerLink
from rlflow.checkpoint_engine.wire import WireTypes
from rlflow.utils.errors import WeightSyncError

ALIGN = 64  # bytes; views of any type start on their own alignment
# A bucket of this size goes out as soon as the server takes another one: both ends work at the same time then.
_EARLY_BYTES = 8 * 2**20
# Beyond this size a bucket waits for the server rather than grow out of the cache.
_MOST_HOST_BYTES = 32 * 2**20
# Memory up to this size is kept for the next update: its pages need not come into being again.
_KEPT_BYTES = 64 * 2**20
# An answer passes through several callbacks of the event loop until its task is done.
_TURNS = 8


class BucketPacker:
    """Packs the tensors of one update and sends the buckets.

    Args:
        spare: memory that an earlier update left (`keep`).

    Attributes:
        names: sent so far.
        digests, total_bytes: of all of them.
        buckets: receipts of the buckets that the server took.
    """

    def __init__(
        self, link: ServerLink, types: WireTypes, bucket_bytes: int, label: str, spare: Sequence[Segment] = ()
    ) -> None:
        self._link, self._types, self._bucket_bytes, self._label = link, types, bucket_bytes, label
        self.names: set[str] = set()
        self.digests: list[int] = []
        self.total_bytes = 0
        self.buckets: list[BucketReceipt] = []
        self._segments: list[Any] = list(spare)
        self._free = list(self._segments)  # the last one is being filled
        self._metas: list[TensorMeta] = []
        self._used = 0
        self._pending: deque[tuple[asyncio.Task[None], Any]] = deque()  # with the segments that they occupy

    async def put(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, first sending the bucket if it does not fit. One larger than a bucket gets its own."""
        if name in self.names:
            raise WeightSyncError(f"The trainer exports {name!r} twice.", tensors=(name,))
        self.names.add(name)
        dtype = self._types.of(name, tensor.dtype)
        size = tensor.numel() * dtype.itemsize
        most = self._bucket_bytes if tensor.is_cuda else min(self._bucket_bytes, _MOST_HOST_BYTES)
        if self._metas and self._used + size > most:
            await self._ship()
        if not self._free:
            self._segments.append(make_segment(self._label, tensor.device))
            self._free.append(self._segments[-1])
        view = self._free[-1].view(max(most, size))
        target = view[self._used : self._used + size].view(dtype)
        with half_of_the_cores():
            digest = copy_with_digest(name, tensor, target)
        self._metas.append(TensorMeta(name, tuple(tensor.shape), type_name(dtype), 0, size, self._used, digest))
        self.digests.append(digest)
        self.total_bytes += size
        self._used = -(-(self._used + size) // ALIGN) * ALIGN
        if self._used >= _EARLY_BYTES and await self._has_room():
            await self._ship()

    async def flush(self) -> None:
        """Send what is left and wait until all of it is loaded."""
        if self._metas:
            await self._ship()
        while self._pending:
            await self._settle()

    async def _ship(self) -> None:
        while len(self._pending) >= self._link.buckets_at_once:
            await self._settle()
        metas, segment = self._metas, self._free.pop()
        segment.seal()
        self._pending.append((asyncio.create_task(self._link.load(metas, segment.path)), segment))
        digests = [meta.digest for meta in metas if meta.digest is not None]
        self.buckets.append(BucketReceipt(len(metas), sum(meta.size for meta in metas), combine(digests)))
        self._metas, self._used = [], 0
        await asyncio.sleep(0)  # lets the call go out before the next tensor keeps this thread busy

    async def _has_room(self) -> bool:
        """Whether the server takes another bucket at once."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        while self._pending and self._pending[0][0].done():
            await self._settle()
        return len(self._pending) < self._link.buckets_at_once

    async def _settle(self) -> None:
        """Wait until the server is done with the oldest bucket that is under way."""
        task, segment = self._pending.popleft()
        await task
        self._free.insert(0, segment)

    def keep(self) -> list[Segment]:
        """Memory for the next update, no longer this one's. Only when the server has answered for all of it."""
        kept = [s for s in self._segments if isinstance(s, Segment) and s.size <= _KEPT_BYTES]
        self._segments = [segment for segment in self._segments if segment not in kept]
        return kept

    def close(self) -> None:
        """Free the memory; called when the server has answered for all of it, or after an error."""
        for task, _ in self._pending:
            task.cancel()
        for segment in self._segments:
            segment.close()
