"""Weights from one layout over the ranks to another, over `torch.distributed`.

    plan, once      every rank tells the others what it holds and wants  ->  the same transfers on all ranks
    run, each sync  parameters in buckets: pack what others need | all_to_all | unpack, copy what is its own

Invariants
    - A rank receives the elements that it wants and does not hold, and nothing else (see `boxes`).
    - Values arrive as they were sent, in the wire type: the cast is made before sending, so that narrower types halve
      the traffic, and copies on a rank are cast alike.
    - Every rank runs the iterator to its end, in the same order of parameters: each bucket is one collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.checkpoint_engine.resharding.boxes import Part, Transfer, local_shape, plan_transfers

BUCKET_BYTES = 64 << 20
WireType = Callable[[str, torch.dtype], torch.dtype]


@dataclass(frozen=True)
class Parameter:
    """A parameter on its way, from the view of one rank.

    Attributes:
        dtype: on the wire.
        shape: of the local tensor that `run` makes for this rank; None when it wants nothing, or has one to fill.
        sends, receives: transfers from and to this rank, sorted by the other rank; copies are in neither.
        copies: transfers within this rank.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    copies: tuple[Transfer, ...]


@dataclass
class ReshardCounts:
    """What runs have moved so far on this rank: bytes from and to other ranks, and seconds."""

    received_bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0


@dataclass
class Resharder:
    """A change of layout, planned once and run at each sync; built by `plan_reshard`.

    Attributes:
        buckets: parameters that travel together, in order.
        counts: of the last run.
    """

    buckets: list[list[Parameter]]
    group: Any = None
    counts: ReshardCounts = field(default_factory=ReshardCounts)

    @property
    def expected_bytes(self) -> int:
        """Bytes that this rank receives in one run."""
        return sum(t.numel * p.dtype.itemsize for bucket in self.buckets for p in bucket for t in p.receives)

    def run(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(name, local part) of what this rank wants, a bucket at a time. *Collective.*

        Args:
            tensors: what this rank holds, by name; CPU or device memory, as the process group needs it.
        """
        self.counts = ReshardCounts()
        for bucket in self.buckets:
            yield from self.exchange(bucket, tensors)

    @torch.no_grad()
    def exchange(
        self, bucket: Sequence[Parameter], tensors: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> list[tuple[str, Tensor]]:
        """One bucket of `run`; adds to `counts`. With `into` it fills those tensors, and returns those it filled."""
        started = time.perf_counter()
        world = dist.get_world_size(self.group)
        device = next((t.device for t in tensors.values()), torch.device("cpu"))
        outgoing, out_sizes = _pack(bucket, tensors, world, device)
        in_sizes = [0] * world
        for parameter in bucket:
            for transfer in parameter.receives:
                in_sizes[transfer.source] += transfer.numel * parameter.dtype.itemsize
        incoming = torch.empty(sum(in_sizes), dtype=torch.uint8, device=device)
        dist.all_to_all_single(incoming, outgoing, in_sizes, out_sizes, group=self.group)
        self.counts.received_bytes += incoming.numel()
        self.counts.sent_bytes += outgoing.numel()
        filled = _unpack(bucket, tensors, incoming, in_sizes, into or {})
        self.counts.seconds += time.perf_counter() - started
        return filled


def _pack(
    bucket: Sequence[Parameter], tensors: Mapping[str, Tensor], world: int, device: torch.device
) -> tuple[Tensor, list[int]]:
    """What other ranks need, one after the other by rank and parameter; and the bytes for each rank."""
    pieces: list[list[Tensor]] = [[] for _ in range(world)]
    for parameter in bucket:
        for transfer in parameter.sends:
            value = tensors[parameter.name][transfer.take].to(parameter.dtype).contiguous()
            pieces[transfer.target].append(value.reshape(-1).view(torch.uint8))
    flat = [piece for of_rank in pieces for piece in of_rank]
    packed = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)
    return packed, [sum(piece.numel() for piece in of_rank) for of_rank in pieces]


def _unpack(
    bucket: Sequence[Parameter],
    tensors: Mapping[str, Tensor],
    incoming: Tensor,
    in_sizes: Sequence[int],
    into: Mapping[str, Tensor],
) -> list[tuple[str, Tensor]]:
    offsets = [sum(in_sizes[:rank]) for rank in range(len(in_sizes))]
    filled = []
    for parameter in bucket:
        if not parameter.receives and not parameter.copies:
            continue
        local = into.get(parameter.name)
        if local is None:
            assert parameter.shape is not None
            local = torch.empty(parameter.shape, dtype=parameter.dtype, device=incoming.device)
        # Receives of a parameter are in the order in which their sources packed them.
        for transfer in parameter.receives:
            size = transfer.numel * parameter.dtype.itemsize
            begin = offsets[transfer.source]
            offsets[transfer.source] += size
            # A clone starts on an own allocation, whatever the alignment of the bytes before it.
            values = incoming[begin : begin + size].clone().view(parameter.dtype)
            local[transfer.put].copy_(values.view(transfer.size))
        for transfer in parameter.copies:
            local[transfer.put].copy_(tensors[parameter.name][transfer.take].to(parameter.dtype))
        filled.append((parameter.name, local))
    return filled


def plan_reshard(
    names: Sequence[str],
    held: Mapping[str, tuple[Part, torch.dtype]],
    wanted: Mapping[str, Part],
    *,
    group: Any = None,
    bucket_bytes: int = BUCKET_BYTES,
    wire_type: WireType | None = None,
    home: Sequence[int] | None = None,
    fills: bool = False,
) -> Resharder:
    """Agree with the other ranks on who sends what. *Collective.*

    Args:
        names: of all parameters of the model, the same on every rank and in the same order.
        held: what this rank holds and its type; a parameter it holds nothing of is left out.
        wanted: what this rank wants; a parameter it wants nothing of is left out.
        bucket_bytes: of one rank's wanted parts that are in flight at once.
        wire_type: (name, stored type) -> type of the values that arrive; None: as stored.
        home: see `plan_transfers`.
        fills: the wanted boxes lie in tensors that the caller has (`exchange(into=...)`), and need not tile them.

    Raises:
        ValueError: a wanted part that the ranks do not hold, or parts that overlap.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    mine = {name: (*held.get(name, ((), None)), wanted.get(name, ())) for name in names}
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, mine, group=group)
    buckets: list[list[Parameter]] = [[]]
    filled = 0
    for name in names:
        dtype = next(entry[name][1] for entry in gathered if entry[name][1] is not None)
        dtype = wire_type(name, dtype) if wire_type is not None else dtype
        held_by, wanted_by = ([entry[name][i] for entry in gathered] for i in (0, 2))
        transfers = plan_transfers(held_by, wanted_by, name, home)
        # Of the rank that wants most, so that all ranks close their buckets at the same parameter.
        size = max(sum(box.numel for box in entry[name][2]) for entry in gathered) * dtype.itemsize
        if buckets[-1] and filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        filled += size
        part = mine[name][2]
        buckets[-1].append(
            Parameter(
                name,
                dtype,
                local_shape(part) if part and not fills else None,
                sends=tuple(t for t in transfers if t.source == rank != t.target),
                receives=tuple(t for t in transfers if t.target == rank != t.source),
                copies=tuple(t for t in transfers if t.source == rank == t.target),
            )
        )
    return Resharder(buckets, group)
