"""Weights between processes of one node: the last hop of every backend, and the only one of `naive`.

The sender packs tensors into memory that the server opens too (`segments`), and tells it where they lie.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from rlflow.checkpoint_engine.base import StoredBucket
from rlflow.checkpoint_engine.checksum import combine
from rlflow.checkpoint_engine.packer import BucketPacker
from rlflow.checkpoint_engine.phases import Phase, PhaseClock, PhaseTimeouts
from rlflow.checkpoint_engine.receipt import WeightReceipt, require_modules
from rlflow.checkpoint_engine.segments import Segment, open_bucket
from rlflow.checkpoint_engine.server_link import ServerLink
from rlflow.checkpoint_engine.wire import WireTypes

__all__ = ["Segment", "SharedMemorySender", "open_bucket"]

Tensors = Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]]


class SharedMemorySender:
    """Sends to the server on this node.

    After a good update it keeps the few pieces of memory that took turns, for the next one (`packer`); after a failed
    one nothing, because a server that hung may still read.

    Args:
        rollout_config: reads `dtype` and `checkpoint_engine`.
        rank: of this process; for the label of its memory and for messages.
    """

    def __init__(self, rollout_config: Any, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        config = rollout_config.checkpoint_engine
        self._types = WireTypes.from_config(rollout_config)
        self._bucket_bytes = int(config.update_weights_bucket_megabytes * 2**20)
        self._timeouts = PhaseTimeouts.from_config(config)
        self._spare: list[Segment] = []
        weakref.finalize(self, _close_all, self._spare)

    async def send(
        self, params: Tensors, server: Any, version: int, lora: dict[str, Any] | None = None
    ) -> WeightReceipt | None:
        """Send all tensors as weight version `version`.

        Every rank calls it with its iterator (advancing it may be a collective operation, so every rank must exhaust
        it, and does so even after an error); only a rank with a `server` handle sends.

        Args:
            lora: PEFT's config, when the tensors are those of an adapter for the weights that the server has.

        Returns:
            The receipt that both ends agree on; None on a rank without a server.

        Raises:
            WeightSyncError: the server holds something else, refused a tensor, or did not answer (`lost`).
        """
        tensors = _each(params)
        if server is None:
            await _exhaust(tensors)
            return None
        clock = PhaseClock(self._timeouts, f"Weight version {version}")
        link = ServerLink(server, version, self._timeouts)
        label = f"rlflow-weights-r{self._rank}"
        packer = BucketPacker(link, self._types, self._bucket_bytes, label, self._spare)
        self._spare.clear()
        started = time.perf_counter()
        try:
            async with clock.phase(Phase.PREPARE):
                await link.begin(lora)
            async with clock.phase(Phase.TRANSFER):
                async for name, tensor in tensors:
                    await packer.put(name, tensor)
                await packer.flush()
            async with clock.phase(Phase.VERIFY):
                got = await link.finish(len(packer.digests), combine(packer.digests))
            self._spare.extend(packer.keep())
        except Exception:
            # Gathering a tensor is collective: the other ranks would wait for this one.
            await _exhaust(tensors)
            raise
        finally:
            packer.close()
        sent = self._sent(version, packer)
        sent.require_same(got, packer.names)
        if lora is not None:
            require_modules(got.lora_modules, got.holder)
        return replace(
            got, seconds=time.perf_counter() - started, buckets=tuple(packer.buckets), metrics=clock.metrics()
        )

    async def send_stored(self, buckets: list[StoredBucket], server: Any, version: int) -> WeightReceipt:
        """Let the server load tensors that lie in files already; as `send` otherwise."""
        clock = PhaseClock(self._timeouts, f"Weight version {version}")
        link = ServerLink(server, version, self._timeouts)
        metas = [meta for bucket, _ in buckets for meta in bucket]
        digests = [meta.digest for meta in metas if meta.digest is not None]
        started = time.perf_counter()
        async with clock.phase(Phase.PREPARE):
            await link.begin()
        async with clock.phase(Phase.TRANSFER):
            for bucket, path in buckets:
                await link.load(bucket, path)
        async with clock.phase(Phase.VERIFY):
            got = await link.finish(len(metas), combine(digests))
        total = sum(meta.size for meta in metas)
        sent = WeightReceipt(version, len(metas), total, combine(digests), holder="the files")
        sent.require_same(got, {meta.name for meta in metas})
        return replace(got, seconds=time.perf_counter() - started, metrics=clock.metrics())

    def _sent(self, version: int, packer: BucketPacker) -> WeightReceipt:
        count, checksum = len(packer.digests), combine(packer.digests)
        return WeightReceipt(version, count, packer.total_bytes, checksum, holder=f"trainer rank {self._rank}")


def _close_all(segments: list[Segment]) -> None:
    for segment in segments:
        segment.close()


async def _each(params: Tensors) -> AsyncIterator[tuple[str, Tensor]]:
    if isinstance(params, AsyncIterable):
        async for item in params:
            yield item
    else:
        for item in params:
            yield item


async def _exhaust(tensors: AsyncIterator[tuple[str, Tensor]]) -> None:
    async for _ in tensors:
        pass
