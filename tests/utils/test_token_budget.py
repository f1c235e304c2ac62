"""Micro-batches: never over the budget, equally many on all ranks, few."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.utils.token_budget import Item, fill_up, pad_parts, split_by_budget

lengths_and_budget = st.tuples(st.lists(st.integers(1, 60), min_size=1, max_size=50), st.integers(60, 300))


def items_of(lengths: list[int]) -> list[Item]:
    return [Item((i,), n, 100 * n + n * n) for i, n in enumerate(lengths)]


@settings(deadline=None)
@given(lengths_and_budget, st.integers(0, 10))
def test_the_budget_holds_also_where_other_ranks_need_more(drawn: tuple[list[int], int], more: int) -> None:
    lengths, budget = drawn
    items = items_of(lengths)
    parts = split_by_budget(items, budget)
    filled = fill_up(parts, items, budget, len(parts) + more)
    assert len(filled) == len(parts) + more
    for cut in (parts, filled):
        assert sorted(row for part in cut for row in part) == list(range(len(lengths)))
        assert all(sum(lengths[row] for row in part) <= budget for part in cut)
        assert all(part == sorted(part) for part in cut)
    # first-fit-decreasing: at most 11/9 of what is possible, and two thirds of a bin
    assert len(parts) <= 11 / 9 * -(-sum(lengths) // budget) + 1 or len(parts) <= len(lengths) / 2 + 1


def test_a_batch_of_thousands_of_rows_is_cut_by_the_fast_way() -> None:
    lengths = [1 + (i * 7919) % 500 for i in range(2000)]
    parts = split_by_budget(items_of(lengths), 8192)
    loads = [sum(lengths[row] for row in part) for part in parts]
    assert max(loads) <= 8192 and len(parts) <= -(-sum(lengths) // 8192) + 1


def test_rows_of_an_item_stay_together() -> None:
    items = [Item((0, 3), 40, 1), Item((1,), 50, 1), Item((2, 4, 5), 30, 1)]
    parts = split_by_budget(items, 80)
    assert sorted(parts) == [[0, 2, 3, 4, 5], [1]] or sorted(parts) == [[0, 3], [1, 2, 4, 5]]


def test_nothing_to_cut_gives_empty_parts() -> None:
    assert split_by_budget([], 10) == []
    assert fill_up([], [], 10, 2) == [[], []]
    assert pad_parts([[1]], 1) == [[1]]
