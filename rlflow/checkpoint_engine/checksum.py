"""A fingerprint of a set of named tensors that both ends of a weight sync compute for themselves.

Invariants
    - It covers name, shape, type and every byte of each tensor.
    - It does not depend on the order of the tensors, so that a sender may stream them as they are gathered.
    - It detects accidents (a lost, doubled, truncated, moved or altered tensor), not an adversary.

The bytes of a tensor, as 64-bit words, fill a table of 1024 columns. Sums along its rows and along its columns are
taken as fast as memory is read (a CRC is an order of magnitude slower), on any device; a CRC of the sums and of the
words that fill no row makes them short. One altered word changes a row and a column, two exchanged ones two of either.
Alterations that leave all sums as they were come in fours, at the corners of a rectangle.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_COLUMNS = 1024
_ROW_BYTES = 8 * _COLUMNS
# Tensors of the host are read in blocks: one as it travels, as it is held (twice as wide) and a scratch of it fit into
# a core's cache, so that copy, cast and checksum cost one pass over memory. A device takes larger ones, because a block
# costs several kernel launches.
BLOCK_BYTES = 32 * _ROW_BYTES
_DEVICE_BLOCK_BYTES = 8192 * _ROW_BYTES


class TensorDigest:
    """The digest of one tensor from its bytes, block by block; all blocks but the last are of whole rows."""

    def __init__(self) -> None:
        self._columns: Tensor | None = None
        self._rows: list[Tensor] = []
        self._rest = b""

    def update(self, block: Tensor) -> None:
        """Add bytes: uint8 [n], contiguous, of any device."""
        import torch

        whole = block.numel() // _ROW_BYTES * _ROW_BYTES
        if whole:
            words = block[:whole]
            if words.storage_offset() % 8 or words.data_ptr() % 8:
                words = words.clone()
            words = words.view(torch.int64).view(-1, _COLUMNS)
            sums = words.sum(0)
            self._columns = sums if self._columns is None else self._columns.add_(sums)
            self._rows.append(words.sum(1))
        if whole < block.numel():
            self._rest += _bytes(block[whole:])

    def value(self, name: str, shape: tuple[int, ...], dtype: str) -> int:
        """The digest, 64 bits."""
        import torch

        columns = 0 if self._columns is None else zlib.crc32(_bytes(self._columns))
        rows = zlib.crc32(_bytes(torch.cat(self._rows))) if self._rows else 0
        head = zlib.crc32(f"{name}|{tuple(shape)}|{dtype}".encode())
        body = _mix((columns << 32) | zlib.crc32(self._rest, rows))
        return _mix(body ^ (head * _GOLDEN & _MASK))


def tensor_digest(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    """The digest of one tensor, as it is in the type `dtype` (None: its own)."""
    flat = tensor.detach().contiguous().view(-1)
    return _digest(name, tuple(tensor.shape), flat, dtype or tensor.dtype)


def copy_with_digest(name: str, source: Tensor, target: Tensor, dtype: torch.dtype | None = None) -> int:
    """Copy a tensor of any layout, type and device into `target`; the digest of what is there now.

    Args:
        target: as many numbers; the digest's shape is the source's.
        dtype: the type that travels, in which the digest is taken; None: the target's.
    """
    shape, dtype = tuple(source.shape), dtype or target.dtype
    if not target.is_contiguous():
        target.copy_(source.view(target.shape))
        return _digest(name, shape, target.contiguous().view(-1), dtype)
    return _digest(name, shape, target.view(-1), dtype, source.detach().reshape(-1))


def _digest(name: str, shape: tuple[int, ...], flat: Tensor, dtype: torch.dtype, source: Tensor | None = None) -> int:
    """Of `flat` [n] in the type `dtype`; `source` [n] is copied into it first, block by block."""
    import torch

    step = (BLOCK_BYTES if flat.device.type == "cpu" else _DEVICE_BLOCK_BYTES) // dtype.itemsize
    scratch = torch.empty(min(step, flat.numel()), dtype=dtype, device=flat.device) if dtype != flat.dtype else None
    digest = TensorDigest()
    for start in range(0, flat.numel(), step):
        block = flat[start : start + step]
        if source is not None:
            block.copy_(source[start : start + step])
        if scratch is not None:
            block = scratch[: block.numel()].copy_(block)
        digest.update(block.view(torch.uint8))
    return digest.value(name, shape, type_name(dtype))


def combine(digests: list[int]) -> int:
    """Digest of a set: the sum modulo 2^64 of mixed digests. Order does not matter, and doubles do not cancel."""
    return sum(digests) & _MASK


def type_name(dtype: torch.dtype) -> str:
    """`bfloat16` of `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _bytes(tensor: Tensor) -> bytes:
    import torch

    array: Any = tensor.cpu().view(torch.uint8).numpy()
    return bytes(array.data)


def _mix(z: int) -> int:
    # splitmix64's finaliser: without it the sum of two digests could be made up by two others.
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
