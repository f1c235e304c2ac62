"""What a rank holds of sharded tensors, on disk and back; `rlflow.checkpoint.shards` describes the files.

Invariant: the pieces of a tensor cover it once, so that any range of rows can be read whoever wrote them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rlflow.checkpoint.shards import FORMAT, ShardReader, write_json, write_tensors
from rlflow.utils.errors import CheckpointError


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _span(tensor: Tensor) -> tuple[int, int]:
    """(start, length) of this rank's part along dimension 0; a scalar counts as one row."""
    start, length = 0, tensor.shape[0] if tensor.dim() else 1
    if not isinstance(tensor, DTensor):
        return start, length
    coordinate = tensor.device_mesh.get_coordinate() or [0]
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            if placement.dim != 0:
                raise CheckpointError(f"a weight is sharded along dimension {placement.dim}; only 0 can be saved")
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


def save_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write every rank's pieces and the index. Names and their order must agree on all ranks. *Collective.*"""
    rank = dist.get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    file = f"rank_{rank:05d}.safetensors"
    mine: dict[str, Tensor] = {}
    entries: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors:
        start, length = _span(tensor)
        pieces = []
        if length > 0 and _writes(tensor):
            mine[name] = local_part(tensor).detach().cpu().contiguous()
            pieces = [{"file": file, "start": start, "length": length}]
        entries[name] = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "pieces": pieces,
        }
    if mine:
        write_tensors(mine, folder / file)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {name: entry["pieces"] for name, entry in entries.items()})
    if rank == 0:
        for name, entry in entries.items():
            entry["pieces"] = [piece for pieces in gathered for piece in pieces[name]]
        write_json(folder / "index.json", {"format": FORMAT, "tensors": entries})
    dist.barrier()


@torch.no_grad()
def read_into(reader: ShardReader, name: str, tensor: Tensor) -> None:
    """Fill this rank's part of `tensor`. `CheckpointError` when the shapes differ."""
    shape = list(tensor.shape)
    if reader.tensors[name]["shape"] != shape:
        raise CheckpointError(
            f"{reader.folder}: {name} has shape {reader.tensors[name]['shape']}, the model needs {shape}; is this the "
            "checkpoint of another model?"
        )
    start, length = _span(tensor)
    if length:
        local_part(tensor).copy_(reader.read(name, start, length))
