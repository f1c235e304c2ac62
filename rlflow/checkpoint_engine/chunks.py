"""Tensors of any size as pieces that fit into buckets of a fixed size, and whole again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from rlflow.checkpoint_engine.checksum import type_name
from rlflow.checkpoint_engine.receipt import TensorMeta
from rlflow.utils.errors import WeightSyncError

ALIGN = 64  # bytes; a view of any type starts on its own alignment
Chunk = tuple[TensorMeta, Tensor]


def split_weight_chunks(weights: Iterable[tuple[str, Tensor]], bucket: int) -> Iterator[Chunk]:
    """Pieces of the tensors, uint8 views, none larger than a bucket.

    A piece whose `offset` is 0 begins a new bucket. A tensor that fits into a bucket is never cut.

    Args:
        bucket: bytes; a multiple of 64 keeps the pieces of a large tensor aligned.
    """
    if bucket < ALIGN:
        raise ValueError(f"a bucket of {bucket} bytes is too small; at least {ALIGN}")
    used = 0
    for name, tensor in weights:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        meta = TensorMeta(name, tuple(tensor.shape), type_name(tensor.dtype), 0, data.numel(), 0)
        if used and used + data.numel() > bucket:
            used = 0
        for start in range(0, max(data.numel(), 1), bucket):
            piece = data[start : start + bucket]
            yield replace(meta, chunk_offset=start, chunk_size=piece.numel(), offset=used), piece
            used = _aligned(used + piece.numel())
            if used >= bucket:
                used = 0


def merge_weight_chunks(chunks: Iterable[Chunk], bucket: int) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors from the pieces of `split_weight_chunks`, in their order.

    A tensor that came in one piece is a view into the memory it came in: valid until the next one is asked for.

    Args:
        bucket: bytes, as the sender's.

    Raises:
        WeightSyncError: a piece is larger than a bucket, out of order, or missing at the end.
    """
    merger = ChunkMerger(bucket)
    for meta, piece in chunks:
        if (tensor := merger.add(meta, piece)) is not None:
            yield meta.name, tensor
    merger.require_whole()


class ChunkMerger:
    """`merge_weight_chunks` piece by piece."""

    def __init__(self, bucket: int) -> None:
        self._bucket = bucket
        self._name, self._whole, self._arrived = "", torch.empty(0, dtype=torch.uint8), 0

    def add(self, meta: TensorMeta, piece: Tensor) -> Tensor | None:
        """The tensor whose last piece this is; None when more of it must come."""
        dtype = getattr(torch, meta.dtype)
        total = math.prod(meta.shape) * dtype.itemsize
        if meta.chunk_size > self._bucket or piece.numel() != meta.chunk_size:
            raise self._odd(meta, f"{piece.numel()} bytes in a bucket of {self._bucket}")
        if meta.chunk_offset == 0:
            self.require_whole()
            if meta.chunk_size == total:
                return piece.view(dtype).view(meta.shape)
            self._name, self._arrived = meta.name, 0
            self._whole = torch.empty(total, dtype=torch.uint8, device=piece.device)
        if (self._name, self._arrived) != (meta.name, meta.chunk_offset):
            raise self._odd(meta, f"it should begin at {self._arrived} of {self._name or 'nothing'}")
        self._whole[meta.chunk_offset : meta.chunk_offset + meta.chunk_size].copy_(piece)
        self._arrived += meta.chunk_size
        if self._arrived < total:
            return None
        whole, self._name = self._whole, ""
        return whole.view(dtype).view(meta.shape)

    def require_whole(self) -> None:
        """`WeightSyncError` names a tensor of which pieces are missing."""
        if self._name:
            raise WeightSyncError(
                f"{self._name} is incomplete: {self._arrived} of {self._whole.numel()} bytes came.",
                tensors=(self._name,),
            )

    def _odd(self, meta: TensorMeta, why: str) -> WeightSyncError:
        text = f"A piece of {meta.name} at byte {meta.chunk_offset} cannot be placed: {why}."
        return WeightSyncError(text, tensors=(meta.name,))


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
