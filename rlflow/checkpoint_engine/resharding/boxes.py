"""Parts of a tensor as boxes, and who sends which box to whom.

Invariants
    - The boxes that a rank holds tile its local tensor; so do those it wants.
    - What a rank has itself it never receives, and no element comes to it twice. The received elements of a rank are
      therefore its wanted ones less those it holds: the least that any exchange could move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor.

    Attributes:
        start, size: in the whole tensor, an entry a dimension.
        local: its first element in the local tensor of the rank that holds or wants it.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]
    local: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.size)

    def cut(self, other: Box) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """(start, size) of what two boxes have in common; None for nothing."""
        start = tuple(map(max, self.start, other.start))
        ends = zip(self.start, self.size, other.start, other.size, strict=True)
        size = tuple(min(s + n, o + m) - first for (s, n, o, m), first in zip(ends, start, strict=True))
        return (start, size) if all(n > 0 for n in size) else None

    def index(self, start: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
        """The place of a part of this box in the local tensor."""
        first = [at - begin + local for at, begin, local in zip(start, self.start, self.local, strict=True)]
        return tuple(slice(i, i + n) for i, n in zip(first, size, strict=True))


Part = tuple[Box, ...]
"""What one rank holds, or wants, of a tensor; empty for nothing."""


@dataclass(frozen=True)
class Transfer:
    """Elements that one rank gives another: `take` indexes the source's local tensor, `put` the destination's."""

    source: int
    target: int
    take: tuple[slice, ...]
    put: tuple[slice, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.size)


def whole(shape: Sequence[int]) -> Part:
    """All of a tensor."""
    return (Box((0,) * len(shape), tuple(shape), (0,) * len(shape)),)


def ranges(shape: Sequence[int], dim: int, spans: Sequence[tuple[int, int]]) -> Part:
    """The (start, length) spans along one dimension, laid one after the other in the local tensor."""
    offsets = accumulate((length for _, length in spans), initial=0)
    boxes = []
    for (start, length), offset in zip(spans, offsets, strict=False):
        if length:
            begin, size, local = [0] * len(shape), list(shape), [0] * len(shape)
            begin[dim], size[dim], local[dim] = start, length, offset
            boxes.append(Box(tuple(begin), tuple(size), tuple(local)))
    return tuple(boxes)


def local_shape(part: Part) -> tuple[int, ...]:
    """Shape of the local tensor that the boxes tile. `ValueError`: they overlap or leave holes in it."""
    if not part:
        return (0,)
    shape = tuple(max(box.local[dim] + box.size[dim] for box in part) for dim in range(len(part[0].size)))
    if prod(shape) != sum(box.numel for box in part):
        raise ValueError(f"boxes {part} do not tile a local tensor of shape {shape}")
    return shape


def plan_transfers(
    held: Sequence[Part], wanted: Sequence[Part], label: str = "a tensor", home: Sequence[int] | None = None
) -> list[Transfer]:
    """Transfers that give every rank what it wants; those from a rank to itself are copies.

    Among the holders of the same elements a rank takes its own, else those of a rank with the same home, the nearest
    first: neighbouring ranks share a node.

    Args:
        held, wanted: one entry a rank.
        label: of the tensor, for messages.
        home: group of each rank within which bytes should travel, for example its node or its micro-DP group.

    Raises:
        ValueError: some wanted elements are held by nobody, or held parts overlap without being equal.
    """
    holders: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, Box]]] = {}
    for rank, part in enumerate(held):
        for box in part:
            holders.setdefault((box.start, box.size), []).append((rank, box))
    transfers = []
    for target, part in enumerate(wanted):
        for box in part:
            covered = 0
            for choices in holders.values():
                common = box.cut(choices[0][1])
                if common is None:
                    continue
                source, from_box = min(choices, key=lambda choice: _distance(choice[0], target, home))
                start, size = common
                transfers.append(
                    Transfer(source, target, from_box.index(start, size), box.index(start, size), tuple(size))
                )
                covered += prod(size)
            if covered != box.numel:
                raise ValueError(
                    f"rank {target} needs {box.numel} elements of {label} at {box.start}, and the ranks hold {covered} "
                    "of them: the training layout has a gap, or parts that overlap without being equal"
                )
    return transfers


def _distance(source: int, target: int, home: Sequence[int] | None) -> tuple[bool, int, int]:
    return home is not None and home[source] != home[target], abs(source - target), source
