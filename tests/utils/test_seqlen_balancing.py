"""Balanced partitions: measured values and laws."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.utils.seqlen_balancing import (
    calculate_workload,
    get_group_balanced_partitions,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    log_seqlen_unbalance,
)


def test_workload() -> None:
    assert calculate_workload(torch.tensor([0, 1, 100, 1000])).tolist() == [0, 24577, 2467600, 25576000]


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
    assert sorted(get_seqlen_balanced_partitions(lengths, k, equal)) == sorted(expected)


def test_unbalance_metrics() -> None:
    metrics = log_seqlen_unbalance([10, 20, 30, 40, 50, 60], [[0, 5], [1, 4], [2, 3]], "p")
    assert metrics == {
        "p/min": 30, "p/max": 110, "p/minmax_diff": 80, "p/balanced_min": 70, "p/balanced_max": 70, "p/mean": 70
    }  # fmt: skip


def test_groups_stay_together() -> None:
    parts = get_group_balanced_partitions([10, 10, 20, 20, 30, 30, 40, 40], list("aabbccdd"), 2)
    assert sorted(parts) == [[0, 1, 6, 7], [2, 3, 4, 5]]


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
