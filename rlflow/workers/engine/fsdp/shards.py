"""Sharded tensors in a folder: one safetensors file a rank and an index of who holds which rows.

`index.json`: {"format", "tensors": {name: {"dtype", "shape", "pieces": [{"file", "start", "length"}]}}}; start and
length count along dimension 0.

Invariant: the pieces of a tensor cover it once, so that any range of rows can be read whoever wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rlflow.utils.errors import CheckpointError

FORMAT = "rlflow-shards-1"


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


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """One safetensors file; `CheckpointError` names it when the disk refuses."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} was not written: {error}") from error


class ShardReader:
    """Reads any range of rows of the tensors in a folder of `save_shards`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, dict[str, Any]] = read_json(folder / "index.json")["tensors"]
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self, name: str) -> Any:
        if name not in self._files:
            try:
                self._files[name] = self._stack.enter_context(safe_open(self.folder / name, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self.folder / name} cannot be read: {error}") from error
        return self._files[name]

    def read(self, name: str, start: int, length: int) -> Tensor:
        """Rows [start, start + length) of a tensor (a scalar as it is)."""
        entry = self.tensors[name]
        if not entry["shape"]:
            return self._open(entry["pieces"][0]["file"]).get_tensor(name)
        parts, covered = [], start
        for piece in sorted(entry["pieces"], key=lambda p: p["start"]):
            first, last = max(covered, piece["start"]), min(start + length, piece["start"] + piece["length"])
            if first < last and first == covered:
                rows = self._open(piece["file"]).get_slice(name)
                parts.append(rows[first - piece["start"] : last - piece["start"]])
                covered = last
        if covered != start + length:
            raise CheckpointError(f"{self.folder}: rows {covered}..{start + length} of {name} are in no file")
        return torch.cat(parts) if parts else torch.empty([0, *entry["shape"][1:]])

    @torch.no_grad()
    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill this rank's part of `tensor`. `CheckpointError` when the shapes differ."""
        shape = list(tensor.shape)
        if self.tensors[name]["shape"] != shape:
            raise CheckpointError(
                f"{self.folder}: {name} has shape {self.tensors[name]['shape']}, the model needs {shape}; is this the "
                "checkpoint of another model?"
            )
        start, length = _span(tensor)
        if length:
            local_part(tensor).copy_(self.read(name, start, length))


def write_json(path: Path, value: Any) -> None:
    """JSON with sorted keys, ended by a newline."""
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def read_json(path: Path) -> Any:
    """Parsed JSON; `CheckpointError` names the file."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
