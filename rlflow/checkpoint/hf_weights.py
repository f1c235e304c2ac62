"""Weights of a Hugging Face folder, written block by block.

A safetensors file is 8 bytes (length of the header, little endian), a JSON header {name: {"dtype", "shape",
"data_offsets"}} and the tensors' bytes in the order of their offsets. As types and shapes are known beforehand, the
header can be written first and the bytes be streamed: however large a tensor, only a block of it is in memory.

    model.safetensors                                     when all fits in one file
    model-00001-of-00002.safetensors, ...                 else, with
    model.safetensors.index.json                          {"metadata": {"total_size"}, "weight_map": {name: file}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlflow.utils.errors import CheckpointError

# The size at which transformers starts a new file.
MAX_FILE_BYTES = 5 * 10**9
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def plan_files(specs: Sequence[TensorSpec], max_bytes: int = MAX_FILE_BYTES) -> dict[str, list[TensorSpec]]:
    """Which tensors go into which file: files of at most `max_bytes`, or of one larger tensor.

    Wide types come first, because a reader maps the file and wants each tensor aligned to its element size.
    """
    files: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in sorted(specs, key=lambda s: -s.dtype.itemsize):
        if files[-1] and size + spec.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(spec)
        size += spec.nbytes
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": part for i, part in enumerate(files, 1)}


def write_weights(
    folder: Path,
    specs: Sequence[TensorSpec],
    blocks: Callable[[str], Iterable[Tensor]],
    *,
    max_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write the tensors and, for several files, their index; returns the weight files.

    Args:
        folder: exists; files of the same names are overwritten.
        specs: what to write.
        blocks: name -> the tensor as consecutive ranges of rows; they are cast to the type of the spec.
        max_bytes: see `plan_files`.

    Raises:
        CheckpointError: the disk refuses, or the blocks of a tensor are not of its shape.
    """
    plan = plan_files(specs, max_bytes)
    for file, part in plan.items():
        _write_file(folder / file, part, blocks)
    if len(plan) > 1:
        index = {
            "metadata": {"total_size": sum(spec.nbytes for spec in specs)},
            "weight_map": {spec.name: file for file, part in plan.items() for spec in part},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return [folder / file for file in plan]


def _header(specs: Iterable[TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        if spec.dtype not in _CODES:
            raise CheckpointError(f"{spec.name} has the type {spec.dtype}, which is not written to safetensors here")
        end = offset + spec.nbytes
        entries[spec.name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    return len(text).to_bytes(8, "little") + text


def _write_file(path: Path, specs: Sequence[TensorSpec], blocks: Callable[[str], Iterable[Tensor]]) -> None:
    try:
        with open(path, "wb") as stream:
            stream.write(_header(specs))
            for spec in specs:
                written = 0
                for block in blocks(spec.name):
                    data = block.detach().to("cpu", spec.dtype).contiguous().reshape(-1).view(torch.uint8).numpy()
                    stream.write(data.data)
                    written += data.nbytes
                if written != spec.nbytes:
                    raise CheckpointError(
                        f"{path}: {spec.name} of shape {list(spec.shape)} needs {spec.nbytes} bytes, got {written}"
                    )
    except OSError as error:
        raise CheckpointError(f"{path} was not written: {error}") from error
