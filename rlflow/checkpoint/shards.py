"""Sharded tensors in a folder: one safetensors file a rank and an index of who holds which rows.

`index.json`: {"format", "tensors": {name: {"dtype", "shape", "pieces": [{"file", "start", "length"}]}}}; start and
length count along dimension 0. The workers write it (`rlflow.workers.engine.fsdp.shards`).

Invariant: the pieces of a tensor cover it once, so that any range of rows can be read whoever wrote them.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlflow.utils.errors import CheckpointError

FORMAT = "rlflow-shards-1"


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """One safetensors file; `CheckpointError` names it when the disk refuses."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} was not written: {error}") from error


@dataclass(frozen=True)
class PendingFile:
    """A file of a checkpoint that is not written yet: tensors for a safetensors file, or a value for JSON.

    Fields:
        path: where it goes; its folder is made.
    """

    path: Path
    tensors: dict[str, Tensor] | None = None
    json: Any = None

    def write(self) -> None:
        """Write it from the memory that it is in now; OSError or `CheckpointError` when the disk refuses."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.tensors is None:
            write_json(self.path, self.json)
        else:
            write_tensors({name: tensor.cpu().contiguous() for name, tensor in self.tensors.items()}, self.path)

    def snapshot(self) -> PendingFile:
        """The same file from a copy in this host's memory, which later steps do not change."""
        if self.tensors is None:
            return replace(self, json=copy.deepcopy(self.json))
        return replace(self, tensors={name: tensor.to("cpu", copy=True) for name, tensor in self.tensors.items()})


class ShardReader:
    """Reads any range of rows of the tensors in a folder of shards.

    Raises:
        CheckpointError: no index, or one of another format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = read_json(folder / "index.json")
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            raise CheckpointError(f"{folder / 'index.json'} is no index of format {FORMAT!r}")
        self.tensors: dict[str, dict[str, Any]] = index["tensors"]
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

    def dtype(self, name: str) -> torch.dtype:
        """The type that a tensor was saved in."""
        return getattr(torch, self.tensors[name]["dtype"])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole tensor."""
        return tuple(self.tensors[name]["shape"])

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
        return torch.cat(parts) if parts else torch.empty([0, *entry["shape"][1:]], dtype=self.dtype(name))

    def blocks(self, name: str, max_bytes: int) -> Iterator[Tensor]:
        """A whole tensor as consecutive ranges of rows, each of at most `max_bytes` (or one row)."""
        shape = self.shape(name)
        if not shape:
            yield self.read(name, 0, 1)
            return
        row_bytes = max(1, math.prod(shape[1:]) * self.dtype(name).itemsize)
        step = max(1, max_bytes // row_bytes)
        for start in range(0, shape[0], step):
            yield self.read(name, start, min(step, shape[0] - start))


def write_json(path: Path, value: Any) -> None:
    """JSON with sorted keys, ended by a newline."""
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def read_json(path: Path) -> Any:
    """Parsed JSON; `CheckpointError` names the file."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
