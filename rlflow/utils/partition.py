"""Split n values into k parts with sums as equal as possible.

    few values    largest differencing (Karmarkar & Karp 1982), which moves whole lists about
    many values   longest first to the emptiest part (LPT; Graham 1969)
    both          then exchanges between the fullest and the emptiest part

`balanced_partition` does this: 4096 values over 8 parts take about two milliseconds.

Invariant: a result is k non-empty, disjoint lists of indices that cover all values; it depends on the numbers only, so
that every process computes the same one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Up to here differencing takes a millisecond or two.
FEW_VALUES = 128
# Exchanges end when no part is further above the mean than this share of it.
TOLERANCE = 1e-4
EXCHANGES, EXCHANGES_PER_PART = 64, 4


def balanced_partition(values: Sequence[int], k: int, equal_size: bool) -> list[list[int]]:
    """k lists of indices with sums as equal as possible; with `equal_size` also with equally many.

    Raises:
        ValueError: `equal_size`, and the values do not split into k parts of the same size.
    """
    split = karmarkar_karp if len(values) <= FEW_VALUES else longest_first
    parts = [np.asarray(part, dtype=np.intp) for part in split(values, k, equal_size)]
    return [part.tolist() for part in _even_out(np.asarray(values, dtype=np.int64), parts, keep_sizes=equal_size)]


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
    """Largest-differencing partition (Karmarkar & Karp 1982) of the values into k index lists.

    Raises:
        ValueError: `equal_size`, and the values do not split into k parts of the same size.
    """
    items = sorted((int(value), index) for index, value in enumerate(seqlen_list))
    if equal_size:
        _check_equal(len(items), k_partitions)
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
    """Give each value, in the given order, to the least loaded part; a full part takes no more when sizes are equal."""
    bias = sum(seqlen_list) + 1 if equal_size else 0
    loads = [0] * k_partitions
    parts: list[list[int]] = [[] for _ in range(k_partitions)]
    for index, value in enumerate(seqlen_list):
        target = loads.index(min(loads))
        parts[target].append(index)
        loads[target] += int(value) + bias
    return parts


def longest_first(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """LPT partition of the values into k index lists.

    With equal sizes the values are dealt in rounds of k, the largest of a round to the least loaded part.

    Raises:
        ValueError: `equal_size`, and the values do not split into k parts of the same size.
    """
    values = np.asarray(seqlen_list, dtype=np.int64)
    order = np.argsort(-values, kind="stable")
    return (_deal if equal_size else _to_the_emptiest)(values, order, k_partitions)


def _check_equal(count: int, k: int) -> None:
    if count % k:
        raise ValueError(f"{count} rows do not split into {k} parts of equal size")


def _to_the_emptiest(values: NDArray[np.int64], order: NDArray[np.intp], k: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(k)]
    # The count breaks ties, so that values of 0 fill no part twice while another is empty.
    heap = [(0, 0, part) for part in range(k)]
    for index, value in zip(order.tolist(), values[order].tolist(), strict=True):
        load, count, part = heap[0]
        parts[part].append(index)
        heapq.heapreplace(heap, (load + value, count + 1, part))
    return parts


def _deal(values: NDArray[np.int64], order: NDArray[np.intp], k: int) -> list[list[int]]:
    _check_equal(len(order), k)
    parts: list[list[int]] = [[] for _ in range(k)]
    loads = [0] * k
    rounds = zip(order.reshape(-1, k).tolist(), values[order].reshape(-1, k).tolist(), strict=True)
    for indices, sizes in rounds:
        emptiest_first = sorted(range(k), key=loads.__getitem__)
        for part, index, size in zip(emptiest_first, indices, sizes, strict=True):
            parts[part].append(index)
            loads[part] += size
    return parts


def _even_out(values: NDArray[np.int64], parts: list[NDArray[np.intp]], *, keep_sizes: bool) -> list[NDArray[np.intp]]:
    """Exchange values between the fullest and the emptiest part while that brings their sums closer."""
    loads = np.array([values[part].sum() for part in parts])
    for _ in range(EXCHANGES + EXCHANGES_PER_PART * len(parts)):
        full, empty = int(loads.argmax()), int(loads.argmin())
        gap = int(loads[full] - loads[empty])
        if loads[full] <= loads.mean() * (1 + TOLERANCE):
            break
        mine, theirs = parts[full], parts[empty]
        # A move is an exchange for a value of 0.
        theirs_values = values[theirs] if keep_sizes else np.append(values[theirs], 0)
        i, j = _best_exchange(values[mine], theirs_values, gap)
        given, taken = mine[i : i + 1], theirs[j : j + 1]
        change = int(values[mine[i]] - theirs_values[j])
        if abs(gap - 2 * change) >= gap:
            break
        parts[full] = np.concatenate([np.delete(mine, i), taken])
        parts[empty] = np.concatenate([theirs[:j], theirs[j + 1 :], given])
        loads[full] -= change
        loads[empty] += change
    return parts


def _best_exchange(mine: NDArray[np.int64], theirs: NDArray[np.int64], gap: int) -> tuple[int, int]:
    """Positions (i, j) for which mine[i] - theirs[j] is nearest to half the gap."""
    order = np.argsort(theirs, kind="stable")
    ranked = theirs[order]
    above = np.searchsorted(ranked, mine - gap // 2).clip(0, len(ranked) - 1)
    below = (above - 1).clip(0)
    errors = np.abs(gap - 2 * (mine - ranked[np.stack([above, below])]))
    which, i = np.unravel_index(int(errors.argmin()), errors.shape)
    return int(i), int(order[(above, below)[int(which)][i]])
