"""Split rows of different lengths into parts of equal work.

    get_seqlen_balanced_partitions    rows over ranks
    partition_keeping_groups          rows over ranks, the rows of a prompt on one rank where the counts allow it
    rearrange_micro_batches           rows into micro-batches under a token budget; `restore_dynamic_batch` undoes it

Invariant: a partition is `k` non-empty, disjoint, sorted index lists that cover all rows; with `equal_size` they have
the same number of rows. The result depends only on the numbers, so that every process computes the same one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError
from rlflow.utils.partition import balanced_partition, greedy_partition, karmarkar_karp
from rlflow.utils.token_budget import Item, fill_up, max_over_ranks, split_by_budget

__all__ = [
    "LINEAR_WORK_PER_TOKEN",
    "calculate_workload",
    "ceildiv",
    "get_group_balanced_partitions",
    "get_reverse_idx",
    "get_seqlen_balanced_partitions",
    "greedy_partition",
    "karmarkar_karp",
    "log_seqlen_unbalance",
    "partition_keeping_groups",
    "rearrange_micro_batches",
    "restore_dynamic_batch",
    "roundup_divisible",
]

# 12 h^2 linear work and 2 h attention work a token, both divided by 2 h, with h = 4096 (a 7B model). What a model
# itself asks for: `rlflow.utils.flops_counter.linear_work_per_token`.
LINEAR_WORK_PER_TOKEN = 24576


def calculate_workload(seqlen_list: Any, linear_work: int = LINEAR_WORK_PER_TOKEN) -> Any:
    """Work of a row of L tokens in units of one attention pair: linear_work x L + L^2.

    Takes a tensor or array of lengths (int64 recommended) and returns the same kind.
    """
    return linear_work * seqlen_list + seqlen_list * seqlen_list


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


# ---- rows over ranks ---------------------------------------------------------------------------------------------


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Balanced partition (`rlflow.utils.partition`); the indices of a part are sorted.

    The part of the largest sum comes first; of equal sums the one with more rows, then the one with the first row.

    Raises:
        ValueError: there are fewer rows than parts, or sizes cannot be equal.
    """
    if len(seqlen_list) < k_partitions:
        raise ValueError(f"{len(seqlen_list)} rows cannot fill {k_partitions} parts")
    parts = [sorted(part) for part in balanced_partition(seqlen_list, k_partitions, equal_size)]
    return sorted(parts, key=lambda rows: (-sum(seqlen_list[row] for row in rows), -len(rows), rows))


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
    seqlen_list: Sequence[int], uids: Sequence[Hashable], k_partitions: int
) -> list[list[int]]:
    """Balanced parts of equally many groups; a group is all rows of one uid, wherever they stand.

    In the order of `get_seqlen_balanced_partitions`.

    Raises:
        ValueError: the number of groups is not a multiple of the number of parts.
    """
    groups = _groups(uids)
    weights = [sum(seqlen_list[i] for i in group) for group in groups]
    parts = get_seqlen_balanced_partitions(weights, k_partitions, equal_size=True)
    return [sorted(index for group in part for index in groups[group]) for part in parts]


def partition_keeping_groups(
    seqlen_list: Sequence[int], uids: Sequence[Hashable], k_partitions: int
) -> list[list[int]]:
    """Balanced parts of equally many rows that keep the rows of one uid together, as far as the counts allow it.

    Groups of one size whose number divides stay whole, all of them. Otherwise a group goes, the one with the most work
    first, to the least loaded part with room for all of it. Where no part has that room, the group fills up the part
    with the most room and the rest of it goes on: at most `k_partitions - 1` groups are split.

    Raises:
        ValueError: the number of rows is not a multiple of the number of parts.
    """
    groups = _groups(uids)
    if len({len(group) for group in groups}) == 1 and len(groups) % k_partitions == 0:
        return get_group_balanced_partitions(seqlen_list, uids, k_partitions)
    if len(seqlen_list) % k_partitions:
        raise ValueError(f"{len(seqlen_list)} rows do not split into {k_partitions} parts of equal size")
    room = [len(seqlen_list) // k_partitions] * k_partitions
    loads = [0] * k_partitions
    parts: list[list[int]] = [[] for _ in range(k_partitions)]
    for group in sorted(groups, key=lambda rows: (-sum(seqlen_list[row] for row in rows), rows)):
        while group:
            fitting = [part for part in range(k_partitions) if room[part] >= len(group)]
            if fitting:
                target = min(fitting, key=loads.__getitem__)
            else:
                target = max(range(k_partitions), key=lambda part: (room[part], -loads[part]))
            put, group = group[: room[target]], group[room[target] :]
            parts[target].extend(put)
            room[target] -= len(put)
            loads[target] += sum(int(seqlen_list[row]) for row in put)
    return [sorted(part) for part in parts]


def _groups(uids: Sequence[Hashable]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for index, uid in enumerate(uids):
        groups.setdefault(uid, []).append(index)
    return list(groups.values())


# ---- rows into micro-batches -------------------------------------------------------------------------------------


def rearrange_micro_batches(
    batch: TensorDict,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
    *,
    linear_work: int = LINEAR_WORK_PER_TOKEN,
) -> tuple[list[TensorDict], list[list[int]]]:
    """Cut a batch into micro-batches of balanced work, none over `max_token_len` tokens.

    *Collective* over `dp_group` with `same_micro_num_in_dp`. A rank without enough rows gets empty micro-batches.

    Args:
        batch: jagged `input_ids`, or dense rows with an `attention_mask` [B, W].
        max_token_len: tokens of a micro-batch; padding does not count.
        dp_group: ranks that make equally many micro-batches; None: only this one.
        num_batches_divided_by: the number of micro-batches becomes a multiple of it.
        same_micro_num_in_dp: whether `dp_group` counts.
        min_num_micro_batch: micro-batches at least.
        use_dynamic_bsz_balance: order them with the small ones at both ends, where a pipeline fills and drains.
        force_group_size: that many consecutive rows stay together.
        linear_work: work of a token in units of one attention pair.

    Returns:
        The micro-batches, and for each the rows of `batch` that it holds.

    Raises:
        ContractError: rows (or groups) alone are over the budget, or the rows do not form whole groups.
    """
    lengths = _row_lengths(batch, max_token_len)
    items = _row_groups(lengths, force_group_size, linear_work)
    largest = max((item.tokens for item in items), default=0)
    if largest > max_token_len:
        raise ContractError(
            f"{force_group_size} row(s) that stay together have {largest} tokens, over max_token_len={max_token_len}; "
            f"raise it to at least {largest}, or shorten prompts or responses"
        )
    parts = split_by_budget(items, max_token_len)
    count = max(len(parts), min_num_micro_batch or 0)
    count = max_over_ranks(count, dp_group if same_micro_num_in_dp else None)
    parts = fill_up(parts, items, max_token_len, roundup_divisible(count, num_batches_divided_by or 1))
    if use_dynamic_bsz_balance:
        work = calculate_workload(torch.tensor(lengths, dtype=torch.int64), linear_work).tolist()
        parts.sort(key=lambda rows: (sum(work[row] for row in rows), rows[:1]), reverse=True)
        parts = parts[::2][::-1] + parts[1::2]
    return [tu.index_select_tensor_dict(batch, rows) for rows in parts], parts


def restore_dynamic_batch(data: Tensor, batch_idx_list: Sequence[Sequence[int]]) -> Tensor:
    """Undo the order of `rearrange_micro_batches`.

    Args:
        data: [N, ...] dense or jagged: the micro-batches' rows one after the other.
        batch_idx_list: the rows of each micro-batch.
    """
    order = [row for rows in batch_idx_list for row in rows]
    reverse = torch.tensor(get_reverse_idx(order), dtype=torch.int64, device=data.device)
    return tu.nested_index_select(data, reverse) if tu.is_nested(data) else data[reverse]


def _row_lengths(batch: TensorDict, max_token_len: int) -> list[int]:
    if tu.is_nested(batch["input_ids"]):
        return tu.nested_lengths(batch["input_ids"]).tolist()
    mask = batch["attention_mask"]
    if mask.shape[1] > max_token_len:
        raise ContractError(
            f"rows are padded to {mask.shape[1]} tokens, over max_token_len={max_token_len}; raise it, or pass jagged "
            "input_ids"
        )
    return mask.sum(-1).tolist()


def _row_groups(lengths: Sequence[int], size: int, linear_work: int) -> list[Item]:
    if size < 1 or len(lengths) % size:
        raise ContractError(f"{len(lengths)} rows do not form groups of force_group_size={size}")
    items = []
    for start in range(0, len(lengths), size):
        members = lengths[start : start + size]
        work = sum(calculate_workload(n, linear_work) for n in members)
        items.append(Item(tuple(range(start, start + size)), sum(members), work))
    return items
