"""Partitions of few and of many values: they cover, they are even, and they come out the same every time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlflow.utils.partition import balanced_partition, greedy_partition, karmarkar_karp, longest_first

values = st.lists(st.integers(0, 5000), min_size=1, max_size=60)
WAYS = (balanced_partition, karmarkar_karp, longest_first, greedy_partition)


def sums(lengths: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(lengths[i] for i in part) for part in parts]


@pytest.mark.parametrize("split", WAYS)
@given(lengths=values, k=st.integers(1, 8), equal=st.booleans())
def test_every_value_is_in_one_part(split, lengths: list[int], k: int, equal: bool) -> None:
    if equal:
        k = min(k, len(lengths))
        lengths = lengths[: len(lengths) // k * k]
    parts = split(lengths, k, equal)
    assert len(parts) == k
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    if equal:
        assert {len(part) for part in parts} == {len(lengths) // k}
    assert split(lengths, k, equal) == parts


@given(lengths=values, k=st.integers(1, 8))
def test_no_part_of_longest_first_is_empty_while_there_are_values(lengths: list[int], k: int) -> None:
    parts = longest_first(lengths, k, False)
    assert sum(not part for part in parts) == max(0, k - len(lengths))


@given(lengths=values, k=st.integers(1, 8))
def test_longest_first_keeps_the_bound_of_graham(lengths: list[int], k: int) -> None:
    """A part only grew while it was the emptiest: it is above the mean by less than one value."""
    loads = sums(lengths, longest_first(lengths, k, False))
    assert max(loads) <= sum(lengths) / k + max(lengths) * (1 - 1 / k) + 1e-9


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 3, 8, 16]), st.booleans())
def test_many_rows_are_even_to_a_thousandth(seed: int, k: int, equal: bool) -> None:
    lengths = np.random.default_rng(seed).lognormal(5.4, 0.8, 96 * k).astype(int) + 1
    work = (3456 * lengths + lengths**2).tolist()
    mean = sum(work) / k
    # The longest row may fill a part alone, or with the shortest ones that must be beside it.
    beside = sum(sorted(work)[:95]) if equal else 0
    assume(max(work) + beside < 0.9 * mean)
    assert max(sums(work, balanced_partition(work, k, equal))) <= 1.001 * mean


@given(lengths=values, k=st.integers(1, 8), equal=st.booleans())
def test_exchanges_only_ever_bring_the_parts_closer(lengths: list[int], k: int, equal: bool) -> None:
    if equal:
        k = min(k, len(lengths))
        lengths = lengths[: len(lengths) // k * k]
    before, after = (sums(lengths, split(lengths, k, equal)) for split in (karmarkar_karp, balanced_partition))
    assert max(after) <= max(before) and min(after) >= min(before)


def test_an_exchange_mends_what_differencing_leaves() -> None:
    """Equal sizes tie differencing to runs of neighbours; 100 needs the smallest values beside it."""
    lengths = [100, 10, 9, 9, 8, 8, 7, 7]
    assert max(sums(lengths, balanced_partition(lengths, 2, True))) == 100 + 7 + 7 + 8
    assert max(sums(lengths, karmarkar_karp(lengths, 2, True))) > 100 + 7 + 7 + 8


@pytest.mark.parametrize("split", [karmarkar_karp, longest_first])
def test_sizes_that_cannot_be_equal_are_refused(split) -> None:
    with pytest.raises(ValueError, match="3 rows do not split into 2 parts"):
        split([1, 2, 3], 2, True)
