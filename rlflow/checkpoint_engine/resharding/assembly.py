"""Whole tensors for the server of a replica, put together in shared memory by the trainer ranks of the replica.

    ranks of a replica, one node        rank k receives its share of each weight    (resharding, over the network)
                                        and writes it to its place in the tensor    (shared memory)
    first rank of the replica           reads whole tensors, and feeds the server

Inference engines take tensors as checkpoints have them and cut them by themselves, so the server's side stays as it is.
But no rank receives the model: together the t ranks of a replica receive it once, less what they hold. With M bytes
sharded over N ranks that is M/t - M/N a rank, what `groups` says of a change from N slices to t.

Invariants
    - A bucket is read when all have written it, and written again when it was read.
    - Every rank runs the iterator to its end. Those that feed no server get no tensors.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.checkpoint_engine.resharding.boxes import Box, Part
from rlflow.checkpoint_engine.resharding.executor import (
    BUCKET_BYTES,
    Parameter,
    ReshardCounts,
    Resharder,
    WireType,
    plan_reshard,
)
from rlflow.checkpoint_engine.resharding.layouts import held_part
from rlflow.checkpoint_engine.shared_memory import Segment

_ALIGN = 64  # bytes; views of any type start on their own alignment


@dataclass
class ReplicaAssembly:
    """Planned once, run at each sync; built by `plan_assembly`.

    Attributes:
        replica_size: ranks of a replica; the first of them feeds its server.
    """

    resharder: Resharder
    replica_size: int
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def counts(self) -> ReshardCounts:
        """What the last run moved over the network."""
        return self.resharder.counts

    def run(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) on the ranks that feed servers; each is valid until the next bucket. *Collective.*

        Args:
            tensors: as the engine stores them.
        """
        self.resharder.counts = ReshardCounts()
        local = {name: _local(value) for name, value in tensors.items()}
        places = [_places(bucket, self.shapes) for bucket in self.resharder.buckets]
        size = max(sum(_padded(end - start) for start, end in bucket.values()) for bucket in places)
        rank = dist.get_rank()
        leads = rank % self.replica_size == 0
        segment = Segment(f"rlflow-reshard-r{rank}") if leads else None
        try:
            own = segment.view(size) if segment is not None else None
            paths: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(paths, segment.path if segment is not None else None)
            memory = own if own is not None else _map(paths[rank - rank % self.replica_size], size)
            for bucket, place in zip(self.resharder.buckets, places, strict=True):
                views = {p.name: _view(memory, place[p.name], p, self.shapes[p.name]) for p in bucket}
                self.resharder.exchange(bucket, local, into=views)
                dist.barrier()
                if leads:
                    yield from views.items()
                dist.barrier()
        finally:
            if segment is not None:
                segment.close()


def plan_assembly(
    tensors: Mapping[str, Tensor],
    replica_size: int,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    wire_type: WireType | None = None,
) -> ReplicaAssembly:
    """Agree with the other ranks on who receives what. *Collective.*

    Args:
        tensors: as the engine stores them, by their Hugging Face names; the same names on all ranks.
        replica_size: ranks of a replica, which are neighbours on one node and divide the world.
        bucket_bytes: whole tensors that lie in a replica's segment at once; a larger tensor is alone.
        wire_type: (name, stored type) -> type of the whole tensors; None: as stored.
    """
    held = {name: held_part(value) for name, value in tensors.items()}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, held)
    shares = {name: _share([parts[name] for parts in gathered], dist.get_rank(), replica_size) for name in tensors}
    resharder = plan_reshard(
        list(tensors),
        {name: (part, tensors[name].dtype) for name, part in held.items() if part},
        shares,
        # A rank's share of a bucket.
        bucket_bytes=bucket_bytes // replica_size,
        wire_type=wire_type,
        fills=True,
    )
    return ReplicaAssembly(resharder, replica_size, {name: tuple(value.shape) for name, value in tensors.items()})


def _share(held: Sequence[Part], rank: int, replica_size: int) -> Part:
    """The boxes of a tensor that a rank brings to its replica, at their places in the whole tensor.

    A box that some rank of the replica holds is that rank's. The others go round by their holders' numbers, so that
    shares are even where the shards are.
    """
    holders: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for holder, part in enumerate(held):
        for box in part:
            holders.setdefault((box.start, box.size), []).append(holder)
    first = rank - rank % replica_size
    share = []
    for (start, size), ranks in holders.items():
        here = [holder for holder in ranks if first <= holder < first + replica_size]
        owner = here[0] if here else first + ranks[0] % replica_size
        if owner == rank:
            share.append(Box(start, size, start))
    return tuple(share)


def _local(value: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return value.to_local() if isinstance(value, DTensor) else value


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _places(bucket: Sequence[Parameter], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """(start, end) of each whole tensor in the segment; bytes."""
    offset, places = 0, {}
    for parameter in bucket:
        size = torch.Size(shapes[parameter.name]).numel() * parameter.dtype.itemsize
        places[parameter.name] = (offset, offset + size)
        offset += _padded(size)
    return places


def _view(memory: Tensor, place: tuple[int, int], parameter: Parameter, shape: Sequence[int]) -> Tensor:
    return memory[place[0] : place[1]].view(parameter.dtype).view(tuple(shape))


def _map(path: str, size: int) -> Tensor:
    """Another process's segment; the mapping goes with the last view."""
    fd = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    finally:
        os.close(fd)
