"""Split rows of different lengths into parts of equal work.

Invariant: a partition is `k` non-empty, disjoint, sorted index lists that cover all rows; with `equal_size` they have
the same number of rows. The result depends only on the numbers, so that every process computes the same one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

# 12 h^2 linear work and 2 h attention work a token, both divided by 2 h, with h = 4096 (a 7B model).
LINEAR_WORK_PER_TOKEN = 24576


def calculate_workload(lengths: Any) -> Any:
    """Work of a row of L tokens in units of one attention pair: 24576 L + L^2.

    Takes a tensor or array of lengths (int64 recommended) and returns the same kind.
    """
    return LINEAR_WORK_PER_TOKEN * lengths + lengths * lengths


def ceildiv(a: int, b: int) -> int:
    """Quotient of a and b, rounded up."""
    return -(-a // b)


def roundup_divisible(a: int, b: int) -> int:
    """The smallest multiple of b that is >= a."""
    return ceildiv(a, b) * b


def get_reverse_idx(indices: Sequence[int]) -> list[int]:
    """The permutation that undoes `indices`."""
    reverse = [0] * len(indices)
    for position, index in enumerate(indices):
        reverse[index] = position
    return reverse


class _Partial:
    """A partial solution: k sets in descending order (sum, then count, then items) and the spread of their sums."""

    __slots__ = ("sets",)

    def __init__(self, sets: list[tuple[int, list[tuple[int, int]]]]) -> None:
        self.sets = sorted(sets, key=lambda s: (s[0], len(s[1]), s[1]), reverse=True)

    def __lt__(self, other: _Partial) -> bool:
        # heapq pops the smallest: the one with the largest spread, ties by the larger top set.
        mine, theirs = self.sets[0][0] - self.sets[-1][0], other.sets[0][0] - other.sets[-1][0]
        if mine != theirs:
            return mine > theirs
        key = (self.sets[0][0], len(self.sets[0][1]), self.sets[0][1])
        return key > (other.sets[0][0], len(other.sets[0][1]), other.sets[0][1])

    def merge(self, other: _Partial) -> _Partial:
        merged = []
        for (sum_a, items_a), (sum_b, items_b) in zip(self.sets, reversed(other.sets), strict=True):
            merged.append((sum_a + sum_b, sorted(items_a + items_b)))
        return _Partial(merged)


def karmarkar_karp(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Largest-differencing partition (Karmarkar & Karp 1982) of the values into k index lists."""
    items = sorted((int(value), index) for index, value in enumerate(seqlen_list))
    if equal_size:
        if len(items) % k_partitions:
            raise ValueError(f"{len(items)} rows do not split into {k_partitions} parts of equal size")
        runs = [items[i : i + k_partitions] for i in range(0, len(items), k_partitions)]
        heap = [_Partial([(value, [(value, index)]) for value, index in run]) for run in runs]
    else:
        empty: list[tuple[int, list[tuple[int, int]]]] = [(0, [])] * (k_partitions - 1)
        heap = [_Partial([(value, [(value, index)]), *empty]) for value, index in items]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, first.merge(second))
    return [[index for _, index in members] for _, members in heap[0].sets]


def greedy_partition(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Give each row, in the given order, to the least loaded part; a full part takes no more when sizes are equal."""
    bias = sum(seqlen_list) + 1 if equal_size else 0
    loads = [0] * k_partitions
    parts: list[list[int]] = [[] for _ in range(k_partitions)]
    for index, value in enumerate(seqlen_list):
        target = loads.index(min(loads))
        parts[target].append(index)
        loads[target] += int(value) + bias
    return parts


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Karmarkar-Karp partition, checked; the indices of each part are sorted.

    Raises ValueError when there are fewer rows than parts, or sizes cannot be equal.
    """
    if len(seqlen_list) < k_partitions:
        raise ValueError(f"{len(seqlen_list)} rows cannot fill {k_partitions} parts")
    parts = [sorted(part) for part in karmarkar_karp(seqlen_list, k_partitions, equal_size)]
    covered = sorted(index for part in parts for index in part)
    if covered != list(range(len(seqlen_list))) or not all(parts):
        raise ValueError("the partition misses rows or has an empty part")
    return parts


def log_seqlen_unbalance(seqlen_list: Sequence[int], partitions: list[list[int]], prefix: str) -> dict[str, float]:
    """Token sums a part before (contiguous chunks of the given order) and after balancing."""
    k = len(partitions)
    size = len(seqlen_list) // k
    before = [sum(seqlen_list[i * size : (i + 1) * size]) for i in range(k)]
    after = [sum(seqlen_list[i] for i in part) for part in partitions]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(seqlen_list) / k,
    }


def get_group_balanced_partitions(
    seqlen_list: Sequence[int], uids: Sequence[str], k_partitions: int
) -> list[list[int]]:
    """Balanced parts that keep consecutive rows of equal uid together."""
    groups: list[list[int]] = []
    for index, uid in enumerate(uids):
        if groups and uids[groups[-1][-1]] == uid:
            groups[-1].append(index)
        else:
            groups.append([index])
    weights = [sum(seqlen_list[i] for i in group) for group in groups]
    parts = get_seqlen_balanced_partitions(weights, k_partitions, equal_size=True)
    return [[index for group in part for index in groups[group]] for part in parts]
