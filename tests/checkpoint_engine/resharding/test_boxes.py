"""Who sends what: everything wanted comes once, the nearest holder sends, gaps are said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.checkpoint_engine.resharding.boxes import Part, local_shape, plan_transfers, ranges, whole


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, int], list[Part], list[Part]]:
    """A matrix shared by ranks along one dimension, evenly or not, and wanted by them along another or in pieces."""
    shape, world = (draw(st.integers(1, 12)), draw(st.integers(1, 12))), draw(st.integers(1, 5))

    def shared(dim: int) -> list[Part]:
        ends = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=world - 1, max_size=world - 1)))
        edges = [0, *ends, shape[dim]]
        return [ranges(shape, dim, [(a, b - a)]) for a, b in zip(edges, edges[1:], strict=False)]

    held, wanted = shared(draw(st.sampled_from([0, 1]))), shared(draw(st.sampled_from([0, 1])))
    if draw(st.booleans()):
        wanted = [whole(shape)] * world
    return shape, held, wanted


@given(cuts())
def test_every_rank_gets_its_part_and_nothing_twice(case: tuple[tuple[int, int], list[Part], list[Part]]) -> None:
    shape, held, wanted = case
    full = np.arange(shape[0] * shape[1]).reshape(shape)

    def local(part: Part) -> np.ndarray:
        out = np.full(local_shape(part) if part else (0, 0), -1)
        for box in part:
            where = tuple(slice(at, at + n) for at, n in zip(box.start, box.size, strict=True))
            out[box.index(box.start, box.size)] = full[where]
        return out

    sources, results = [local(part) for part in held], [np.full_like(local(part), -1) for part in wanted]
    for move in plan_transfers(held, wanted):
        assert np.all(results[move.target][move.put] == -1), "no element comes twice"
        results[move.target][move.put] = sources[move.source][move.take]
    for part, result in zip(wanted, results, strict=True):
        assert np.array_equal(result, local(part))


def test_the_nearest_holder_sends() -> None:
    halves = [ranges((4,), 0, [(0, 2)]), ranges((4,), 0, [(2, 2)])]
    held, wanted = [*halves, *halves], [whole((4,))] * 4

    def pairs(home: list[int] | None) -> set[tuple[int, int]]:
        return {(move.source, move.target) for move in plan_transfers(held, wanted, home=home)}

    own = {(rank, rank) for rank in range(4)}
    assert pairs(None) == own | {(1, 0), (0, 1), (1, 2), (2, 3)}
    # Bytes stay at home where somebody there has them.
    assert pairs([0, 1, 1, 0]) == own | {(3, 0), (2, 1), (1, 2), (0, 3)}


def test_spans_lie_one_after_the_other_in_the_local_tensor() -> None:
    part = ranges((8, 3), 0, [(1, 2), (6, 1)])
    assert local_shape(part) == (3, 3)
    assert [box.local for box in part] == [(0, 0), (2, 0)]


def test_what_nobody_holds_is_said() -> None:
    with pytest.raises(ValueError, match="rank 1 needs 4 elements of w"):
        plan_transfers([ranges((4,), 0, [(0, 3)]), ()], [(), whole((4,))], "w")
