"""Cut rows into micro-batches under a token budget.

Invariants
    - The budget is a hard cap: no micro-batch holds more tokens than it, whatever the balance.
    - Rows of one `Item` stay together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlflow.utils.partition import balanced_partition


@dataclass(frozen=True)
class Item:
    """Rows that stay together: their tokens in one forward and their work."""

    rows: tuple[int, ...]
    tokens: int
    work: int


def split_by_budget(items: Sequence[Item], budget: int) -> list[list[int]]:
    """Few micro-batches of balanced work, none over the budget; rows ascend within each.

    Balanced partitions are tried first, for the smallest count that can work; first-fit-decreasing always fits. No item
    may be over the budget by itself.
    """
    if not items:
        return []
    packed = _first_fit(items, budget)
    fewest = -(-sum(item.tokens for item in items) // budget)
    for count in range(fewest, len(packed) + 1):
        parts = balanced_parts(items, budget, count)
        if parts is not None:
            return parts
    return packed


def balanced_parts(items: Sequence[Item], budget: int, count: int) -> list[list[int]] | None:
    """`count` parts of balanced work (fewer when there are fewer items); None when one would be over the budget."""
    count = min(count, len(items))
    if count < 1:
        return []
    parts = balanced_partition([item.work for item in items], count, equal_size=False)
    if any(sum(items[i].tokens for i in part) > budget for part in parts):
        return None
    return [sorted(row for i in part for row in items[i].rows) for part in parts]


def fill_up(parts: list[list[int]], items: Sequence[Item], budget: int, count: int) -> list[list[int]]:
    """The same rows in `count` micro-batches: cut finer where that works, with empty ones behind where not."""
    if count > len(parts):
        parts = balanced_parts(items, budget, count) or parts
    return pad_parts(parts, count)


def pad_parts(parts: list[list[int]], count: int) -> list[list[int]]:
    """The parts, and empty ones up to `count`."""
    return parts + [[] for _ in range(count - len(parts))]


def split_padded(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Micro-batches for a padded forward: rows x longest row stays within the budget. Rows of similar length meet."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    parts: list[list[int]] = []
    for i in order:
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= budget:
            parts[-1].append(i)
        else:
            parts.append([i])
    return [sorted(part) for part in parts]


def max_over_ranks(count: int, group: Any) -> int:
    """The largest count of any rank of a process group; None: only this process. *Collective.*"""
    if group is None or dist.get_world_size(group) == 1:
        return count
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    tensor = torch.tensor(count, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return int(tensor)


def _first_fit(items: Sequence[Item], budget: int) -> list[list[int]]:
    """First-fit-decreasing: at most 11/9 of the fewest bins that are possible, and a constant."""
    free: list[int] = []
    bins: list[list[int]] = []
    for item in sorted(items, key=lambda item: (-item.tokens, item.rows)):
        at = next((i for i, room in enumerate(free) if room >= item.tokens), None)
        if at is None:
            at = len(bins)
            free.append(budget)
            bins.append([])
        free[at] -= item.tokens
        bins[at].extend(item.rows)
    return [sorted(rows) for rows in bins]
