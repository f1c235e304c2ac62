"""Balanced partitions: measured values and laws."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError
from rlflow.utils.seqlen_balancing import (
    calculate_workload,
    ceildiv,
    get_group_balanced_partitions,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    log_seqlen_unbalance,
    partition_keeping_groups,
    rearrange_micro_batches,
    restore_dynamic_batch,
    roundup_divisible,
)


def test_workload() -> None:
    assert calculate_workload(torch.tensor([0, 1, 100, 1000])).tolist() == [0, 24577, 2467600, 25576000]
    assert calculate_workload(10, linear_work=3) == 130
    assert ceildiv(7, 3) == 3 and roundup_divisible(7, 3) == 9


@pytest.mark.parametrize(
    ("lengths", "k", "equal", "expected"),
    [
        ([10, 20, 30, 40, 50, 60], 3, True, [[0, 5], [1, 4], [2, 3]]),
        ([10, 20, 30, 40, 50, 60], 3, False, [[0, 5], [1, 4], [2, 3]]),
        ([5, 5, 5, 100], 2, False, [[3], [0, 1, 2]]),
        ([1, 2, 3, 4, 5, 6, 7, 8], 4, True, [[0, 7], [1, 6], [2, 5], [3, 4]]),
        ([100, 1, 1, 1], 2, True, [[0, 1], [2, 3]]),
        ([7, 7, 7, 7], 2, False, [[0, 3], [1, 2]]),
    ],
)
def test_measured_partitions(lengths: list[int], k: int, equal: bool, expected: list[list[int]]) -> None:
    assert get_seqlen_balanced_partitions(lengths, k, equal) == expected


def test_parts_come_by_sum_then_rows_then_first_row() -> None:
    assert get_seqlen_balanced_partitions([5, 5, 10], 2, False) == [[0, 1], [2]]
    assert get_seqlen_balanced_partitions([1, 9, 1, 9], 2, True) == [[0, 3], [1, 2]]
    assert get_seqlen_balanced_partitions([1, 2, 3], 3, True) == [[2], [1], [0]]


def test_unbalance_metrics() -> None:
    metrics = log_seqlen_unbalance([10, 20, 30, 40, 50, 60], [[0, 5], [1, 4], [2, 3]], "p")
    assert metrics == {
        "p/min": 30, "p/max": 110, "p/minmax_diff": 80, "p/balanced_min": 70, "p/balanced_max": 70, "p/mean": 70
    }  # fmt: skip


@pytest.mark.parametrize("split", [get_group_balanced_partitions, partition_keeping_groups])
def test_groups_stay_together_wherever_their_rows_stand(split) -> None:
    parts = split([10, 10, 20, 20, 30, 30, 40, 40], list("aabbccdd"), 2)
    assert parts == [[0, 1, 6, 7], [2, 3, 4, 5]]
    parts = split([10, 20, 30, 40, 40, 30, 20, 10], list("abcddcba"), 2)
    assert parts == [[0, 3, 4, 7], [1, 2, 5, 6]]


def test_groups_that_cannot_all_be_whole() -> None:
    with pytest.raises(ValueError, match="3 rows do not split into 2 parts"):
        get_group_balanced_partitions([1, 1, 1, 1, 1, 1], list("aabbcc"), 2)
    parts = partition_keeping_groups([9, 9, 5, 5, 5, 5], list("aabbcc"), 2)
    assert parts == [[0, 1, 5], [2, 3, 4]], "the last group is split, the two others are whole"
    with pytest.raises(ValueError, match="3 rows do not split into 2 parts"):
        partition_keeping_groups([1, 1, 1], list("aab"), 2)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_groups_give_equal_row_counts_and_few_are_split(sizes: list[int], k: int, random) -> None:
    uids = [group for group, size in enumerate(sizes) for _ in range(size)]
    uids += [f"pad{i}" for i in range(-len(uids) % k)]
    random.shuffle(uids)
    lengths = [random.randint(1, 500) for _ in uids]
    parts = partition_keeping_groups(lengths, uids, k)
    assert sorted(row for part in parts for row in part) == list(range(len(uids)))
    assert {len(part) for part in parts} == {len(uids) // k}
    homes = {uid: {part for part in range(k) if any(uids[row] == uid for row in parts[part])} for uid in uids}
    assert sum(len(home) > 1 for home in homes.values()) <= max(0, k - 1)


@given(st.lists(st.integers(1, 5000), min_size=4, max_size=40), st.integers(1, 4), st.booleans())
def test_a_partition_covers_every_row_once(lengths: list[int], k: int, equal: bool) -> None:
    if equal:
        lengths = lengths[: len(lengths) // k * k]
    parts = get_seqlen_balanced_partitions(lengths, k, equal)
    flat = [index for part in parts for index in part]
    assert sorted(flat) == list(range(len(lengths)))
    assert all(parts) and (not equal or len({len(part) for part in parts}) == 1)
    assert [flat[i] for i in get_reverse_idx(flat)] == list(range(len(lengths)))


def test_too_few_rows() -> None:
    with pytest.raises(ValueError, match="cannot fill"):
        get_seqlen_balanced_partitions([1], 2, False)


# ---- micro-batches -----------------------------------------------------------------------------------------------


def jagged(lengths: list[int]):
    ids = tu.nested_from_list([torch.full((n,), row) for row, n in enumerate(lengths)])
    return tu.get_tensordict({"input_ids": ids})


LENGTHS = [10, 90, 40, 60, 30, 50, 20, 80]


@pytest.mark.parametrize(
    ("balance", "expected"),
    [(True, [[1], [6, 7], [0, 2, 5], [3, 4]]), (False, [[6, 7], [0, 2, 5], [1], [3, 4]])],
)
def test_measured_micro_batches(balance: bool, expected: list[list[int]]) -> None:
    batches, rows = rearrange_micro_batches(jagged(LENGTHS), 100, use_dynamic_bsz_balance=balance)
    assert rows == expected
    assert [tu.nested_lengths(b["input_ids"]).sum().item() for b in batches] == [
        sum(LENGTHS[row] for row in part) for part in expected
    ]


def test_dense_rows_count_by_their_mask() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0]])
    batch = tu.get_tensordict({"input_ids": torch.arange(12).reshape(3, 4), "attention_mask": mask})
    batches, rows = rearrange_micro_batches(batch, 4)
    assert sorted(rows) == [[0, 2], [1]]
    joined = torch.cat([b["input_ids"] for b in batches])
    assert torch.equal(restore_dynamic_batch(joined, rows), batch["input_ids"])
    with pytest.raises(ContractError, match="padded to 4"):
        rearrange_micro_batches(batch, 3)


def test_numbers_of_micro_batches_can_be_asked_for() -> None:
    assert len(rearrange_micro_batches(jagged(LENGTHS), 100, min_num_micro_batch=6)[0]) == 6
    batches, rows = rearrange_micro_batches(jagged(LENGTHS), 100, num_batches_divided_by=3)
    assert len(rows) == 6 and all(rows)
    batches, rows = rearrange_micro_batches(jagged([5, 5]), 100, num_batches_divided_by=4)
    assert sorted(rows) == [[], [], [0], [1]], "more than there are rows: the others are empty"
    assert sorted(len(b) for b in batches) == [0, 0, 1, 1]


def test_forced_groups_stay_together_or_are_refused() -> None:
    _, rows = rearrange_micro_batches(jagged(LENGTHS), 130, force_group_size=2)
    assert all(part[i + 1] == part[i] + 1 and part[i] % 2 == 0 for part in rows for i in range(0, len(part), 2))
    with pytest.raises(ContractError, match="have 100 tokens, over max_token_len=99"):
        rearrange_micro_batches(jagged(LENGTHS), 99, force_group_size=2)
    with pytest.raises(ContractError, match="force_group_size=3"):
        rearrange_micro_batches(jagged(LENGTHS), 300, force_group_size=3)


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(60, 200), st.booleans())
def test_the_order_of_micro_batches_can_be_undone(lengths: list[int], budget: int, balance: bool) -> None:
    batch = jagged(lengths)
    batches, rows = rearrange_micro_batches(batch, budget, use_dynamic_bsz_balance=balance)
    assert all(sum(lengths[row] for row in part) <= budget for part in rows)
    joined = tu.concat_nested_tensors([b["input_ids"] for b in batches])
    restored = restore_dynamic_batch(joined, rows)
    assert all(torch.equal(a, b) for a, b in zip(restored.unbind(), batch["input_ids"].unbind(), strict=True))
