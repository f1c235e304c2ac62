"""`broadcast` (alias `nccl`): trainer rank 0 to all receivers at once, over a process group of their own.

    rank 0: trainer rank 0      ──header──bytes──header──bytes── ... ──header "end"──>     ranks 1..N: receivers
    other trainer ranks: gather the tensors together with rank 0 and drop them

Gloo on a CPU, NCCL on GPUs. Two buffers take turns at both ends: one is filled or emptied while the other travels.

Invariants
    - The group is apart from the trainer's own (no default group is touched), so that its members may change: whoever
      prepares again gets a new group.
    - Every operation has the deadline of the transfer. After an error the group is given up; the next sync makes one.
    - Headers are JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import astuple, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry, exhaust
from rlflow.checkpoint_engine.checksum import tensor_digest
from rlflow.checkpoint_engine.chunks import ChunkMerger, split_weight_chunks
from rlflow.checkpoint_engine.receipt import TensorMeta
from rlflow.utils.device import get_device
from rlflow.utils.errors import ContractError, WeightSyncError

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_END = "end"
Work = Any


@CheckpointEngineRegistry.register("nccl")
@CheckpointEngineRegistry.register("broadcast")
class BroadcastCheckpointEngine(CheckpointEngine):
    """See the module.

    Args:
        bucket_size: bytes of one of the two buffers.
        is_master: trainer rank 0.
        group_name: tells groups apart that share a rendezvous.
        rebuild_group: make a new group for every sync.
    """

    def __init__(
        self, bucket_size: int, is_master: bool = False, group_name: str = "default", rebuild_group: bool = False
    ) -> None:
        self._bucket = max(64, bucket_size // 64 * 64)
        self._is_master, self._group_name, self._rebuild = is_master, group_name, rebuild_group
        self._device = get_device()
        self._store: Any = None
        self._group: Any = None
        self._buffers: list[Tensor] = []
        self._failed = False

    # ---- the group -----------------------------------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Give up an old group; rank 0 opens a rendezvous on the loopback device, or on the node's where others are."""
        self._leave()
        if not self._is_master:
            return {}
        address = own_address()
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self.timeouts.prepare),
            master_listen_fd=listener.detach(),
        )
        return {"address": address, "port": port}

    @classmethod
    def build_topology(
        cls, actor_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Trainer rank 0 is rank 0, receivers are 1..N; the other trainer ranks are -1, outside."""
        world = rollout_world_size + 1
        master = next((entry for entry in metadata if entry), None)
        if master is None:
            raise ContractError("no trainer rank is the master of the broadcast: none of them opened a rendezvous")

        def of(ranks: list[int]) -> dict[str, list[Any]]:
            same = {"world_size": world, "address": master["address"], "port": master["port"]}
            return {"rank": ranks, **{key: [value] * len(ranks) for key, value in same.items()}}

        return of([0] + [-1] * (actor_world_size - 1)), of(list(range(1, world)))

    def init_process_group(self, rank: int, world_size: int, address: str, port: int) -> None:  # type: ignore[override]
        """Join; blocks until all have joined or the deadline of `prepare` is over."""
        if rank < 0:
            return
        limit = timedelta(seconds=self.timeouts.prepare)
        if self._store is None:
            self._store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
        store = dist.PrefixStore(self._group_name, self._store)
        operation = timedelta(seconds=self.timeouts.transfer)
        if self._device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = operation
            self._group = dist.ProcessGroupNCCL(store, rank, world_size, options)
        else:
            store.set_timeout(limit)
            self._group = dist.ProcessGroupGloo(store, rank, world_size, operation)
        self._failed = False

    def finalize(self) -> None:
        if self._failed or self._rebuild:
            self._leave()

    def _leave(self) -> None:
        group, self._group, self._store = self._group, None, None
        self._buffers = []
        if group is not None and hasattr(group, "abort"):
            with contextlib.suppress(RuntimeError):  # it may be broken: that is why it is left
                group.abort()

    # ---- sending -------------------------------------------------------------------------------------------------

    async def send_weights(
        self, weights: Iterator[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float] | None:
        weights = iter(weights)
        if not self._is_master:
            exhaust(weights)
            return None
        if self._group is None:
            raise ContractError("send_weights before init_process_group: this rank belongs to no broadcast group")
        try:
            buckets = self._send(weights)
        except RuntimeError as error:  # what torch.distributed raises when a member is gone or the time is over
            self._failed = True
            raise WeightSyncError(f"The broadcast of weights broke off: {error}", phase="transfer") from error
        finally:
            exhaust(weights)
        return {"buckets": float(buckets)}

    def _send(self, weights: Iterator[tuple[str, Tensor]]) -> int:
        buffers = self._two_buffers()
        digests: dict[str, int] = {}
        pending: list[Work] = []
        metas: list[TensorMeta] = []
        count = 0

        def ship() -> None:
            nonlocal pending, metas, count
            if not metas:
                return
            self._wait(pending)
            used = metas[-1].offset + metas[-1].chunk_size
            pending = self._post({"metas": [astuple(meta) for meta in metas]}, buffers[count % 2][:used])
            metas, count = [], count + 1

        for meta, piece in split_weight_chunks(_noting_digests(weights, digests), self._bucket):
            if meta.offset == 0:
                ship()
            buffers[count % 2][meta.offset : meta.offset + meta.chunk_size].copy_(piece)
            metas.append(replace(meta, digest=digests[meta.name]))
        ship()
        self._wait(pending)
        self._wait(self._post({_END: len(digests)}, None))
        return count

    def _post(self, header: dict[str, Any], data: Tensor | None) -> list[Work]:
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8).to(self._device)
        sizes = torch.tensor([text.numel(), 0 if data is None else data.numel()], device=self._device)
        return [self._broadcast(part) for part in (sizes, text, data) if part is not None and part.numel()]

    # ---- receiving -----------------------------------------------------------------------------------------------

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        if self._group is None:
            raise ContractError("receive_weights before init_process_group: this process belongs to no group")
        buffers, merger, count = self._two_buffers(), ChunkMerger(self._bucket), 0
        coming = asyncio.create_task(asyncio.to_thread(self._next, buffers[0]))
        try:
            while (metas := await coming) is not None:
                buffer = buffers[count % 2]
                count += 1
                coming = asyncio.create_task(asyncio.to_thread(self._next, buffers[count % 2]))
                for meta in metas:
                    tensor = merger.add(meta, buffer[meta.offset : meta.offset + meta.chunk_size])
                    if tensor is not None:
                        _require_digest(meta, tensor)
                        yield meta.name, tensor
            merger.require_whole()
        except RuntimeError as error:
            self._failed = True
            raise WeightSyncError(f"The broadcast of weights broke off: {error}", phase="transfer") from error
        finally:
            coming.cancel()

    def _next(self, buffer: Tensor) -> list[TensorMeta] | None:
        """The next bucket into `buffer`; None at the end."""
        sizes = torch.empty(2, dtype=torch.int64, device=self._device)
        self._wait([self._broadcast(sizes)])
        header_size, data_size = sizes.tolist()
        text = torch.empty(header_size, dtype=torch.uint8, device=self._device)
        self._wait([self._broadcast(text)])
        header = json.loads(bytes(text.cpu().numpy()))
        if _END in header:
            return None
        if data_size:
            self._wait([self._broadcast(buffer[:data_size])])
        return [TensorMeta(name, tuple(shape), *rest) for name, shape, *rest in header["metas"]]

    # ---- both ----------------------------------------------------------------------------------------------------

    def _two_buffers(self) -> list[Tensor]:
        if not self._buffers:
            self._buffers = [torch.empty(self._bucket, dtype=torch.uint8, device=self._device) for _ in range(2)]
        return self._buffers

    def _broadcast(self, tensor: Tensor) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=self.timeouts.transfer)
        return self._group.broadcast([tensor], options)

    def _wait(self, works: list[Work]) -> None:
        for work in works:
            work.wait(timedelta(seconds=self.timeouts.transfer))
        if works and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def own_address() -> str:
    """Where other members reach this process: the loopback device when all are on this machine."""
    if os.environ.get("GLOO_SOCKET_IFNAME") == "lo":
        return _LOOPBACK
    import ray

    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else _LOOPBACK


def _noting_digests(weights: Iterator[tuple[str, Tensor]], digests: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        if name in digests:
            raise WeightSyncError(f"The trainer exports {name!r} twice.", tensors=(name,))
        digests[name] = tensor_digest(name, tensor)
        yield name, tensor


def _require_digest(meta: TensorMeta, tensor: Tensor) -> None:
    if meta.digest is not None and tensor_digest(meta.name, tensor) != meta.digest:
        raise WeightSyncError(f"{meta.name} arrived with other bytes than were broadcast.", tensors=(meta.name,))
