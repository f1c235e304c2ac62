"""Counts what passes: the sender's side of the receipt for backends that only move tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from rlflow.checkpoint_engine.checksum import combine, tensor_digest
from rlflow.checkpoint_engine.receipt import WeightReceipt


class Tally:
    """An iterator over tensors that keeps their digests; `receipt` after the last one."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights = iter(weights)
        self._digests: list[int] = []
        self._bytes = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        name, tensor = next(self._weights)
        self._digests.append(tensor_digest(name, tensor))
        self._bytes += tensor.numel() * tensor.element_size()
        return name, tensor

    def receipt(self, version: int, holder: str) -> WeightReceipt:
        """Of all that passed."""
        return WeightReceipt(version, len(self._digests), self._bytes, combine(self._digests), holder=holder)
