"""What a rank holds of sharded tensors, on disk and back; `rlflow.checkpoint.shards` describes the files.

Invariant: the pieces of a tensor cover it once, so that any range of rows can be read whoever wrote them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, empty

from rlflow.checkpoint.shards import FORMAT, PendingFile, ShardReader
from rlflow.utils.errors import CheckpointError


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _row_placements(tensor: Tensor) -> list[Placement] | None:
    """How to lay out a tensor whose parts are no ranges of rows (tensor parallel) so that they are; None: they are.

    Rows go over the last dimension of the mesh along which the tensor is split, copies over the others.
    """
    if not isinstance(tensor, DTensor):
        return None
    # Not `is_shard`: the placement of a dimension that tensor parallel and FSDP both split says no to it.
    split = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if not split or (len(split) == 1 and tensor.placements[split[0]] == Shard(0)):
        return None
    return [Shard(0) if dim == split[-1] else Replicate() for dim in range(tensor.device_mesh.ndim)]


def _by_rows(tensor: Tensor) -> Tensor:
    """The tensor in a layout whose parts are ranges of rows. *Collective* where it is in another one."""
    placements = _row_placements(tensor)
    if placements is None:
        return tensor
    assert isinstance(tensor, DTensor)
    return tensor.redistribute(placements=placements)


def _span(tensor: Tensor) -> tuple[int, int]:
    """(start, length) of this rank's part along dimension 0 of a tensor by rows; a scalar counts as one row."""
    start, length = 0, tensor.shape[0] if tensor.dim() else 1
    if not isinstance(tensor, DTensor):
        return start, length
    coordinate = tensor.device_mesh.get_coordinate() or [0]
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            chunk = -(-length // tensor.device_mesh.size(dim))
            offset = min(coordinate[dim] * chunk, length)
            start, length = start + offset, min(chunk, length - offset)
    return start, length


def _writes(tensor: Tensor) -> bool:
    """Whether this rank is the one that writes its part: the first of those that hold the same."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate() or [0]
    pairs = zip(coordinate, tensor.placements, strict=False)
    return all(place == 0 for place, placement in pairs if not isinstance(placement, Shard))


@torch.no_grad()
def shard_files(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> Iterator[PendingFile]:
    """The file of this rank's pieces, and on rank 0 the index. Names and their order must agree on all ranks.

    *Collective*: every rank must run the iterator to its end.
    """
    rank = dist.get_rank()
    file = f"rank_{rank:05d}.safetensors"
    mine: dict[str, Tensor] = {}
    entries: dict[str, dict[str, Any]] = {}
    for name, stored in tensors:
        tensor = _by_rows(stored)
        start, length = _span(tensor)
        pieces = []
        if length > 0 and _writes(tensor):
            mine[name] = local_part(tensor).detach()
            pieces = [{"file": file, "start": start, "length": length}]
        entries[name] = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "pieces": pieces,
        }
    if mine:
        yield PendingFile(folder / file, tensors=mine)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {name: entry["pieces"] for name, entry in entries.items()})
    if rank == 0:
        for name, entry in entries.items():
            entry["pieces"] = [piece for pieces in gathered for piece in pieces[name]]
        yield PendingFile(folder / "index.json", json={"format": FORMAT, "tensors": entries})


@torch.no_grad()
def read_into(reader: ShardReader, name: str, tensor: Tensor) -> None:
    """Fill this rank's part of `tensor` (a collective under tensor parallel). `CheckpointError`: other shapes."""
    shape = list(tensor.shape)
    if reader.tensors[name]["shape"] != shape:
        raise CheckpointError(
            f"{reader.folder}: {name} has shape {reader.tensors[name]['shape']}, the model needs {shape}; is this the "
            "checkpoint of another model?"
        )
    rows, placements = tensor, _row_placements(tensor)
    if placements is not None:
        assert isinstance(tensor, DTensor)
        rows = empty(shape, dtype=tensor.dtype, device_mesh=tensor.device_mesh, placements=placements)
    start, length = _span(rows)
    if length:
        local_part(rows).copy_(reader.read(name, start, length))
    if rows is not tensor:
        assert isinstance(rows, DTensor) and isinstance(tensor, DTensor)
        local_part(tensor).copy_(local_part(rows.redistribute(placements=tensor.placements)))
