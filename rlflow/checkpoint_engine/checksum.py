"""A fingerprint of a set of named tensors that both ends of a weight sync compute for themselves.

Invariants
    - It covers name, shape, type and every byte of each tensor.
    - It does not depend on the order of the tensors, so that a sender may stream them as they are gathered.
    - It detects accidents (a lost, doubled, truncated or altered tensor), not an adversary.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_MASK = (1 << 64) - 1


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    import torch

    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def tensor_digest(name: str, tensor: Tensor) -> int:
    """64 bits of one tensor (contiguous, CPU): the CRC of its bytes beside the CRC of its name, shape and type."""
    head = f"{name}|{tuple(tensor.shape)}|{tensor.dtype}".encode()
    return _mix((zlib.crc32(byte_view(tensor)) << 32) | zlib.crc32(head))


def combine(digests: list[int]) -> int:
    """Digest of a set: the sum modulo 2^64 of mixed digests. Order does not matter, and doubles do not cancel."""
    return sum(digests) & _MASK


def _mix(z: int) -> int:
    # splitmix64's finaliser: without it the sum of two CRCs could be made up by two others.
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
