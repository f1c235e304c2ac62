"""The groups of a change of layout waste nothing: checked on tagged elements, for many sizes, without processes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.checkpoint_engine.resharding.groups import HybridGroups, plan_hybrid_groups

LAYERS_A_STAGE = 2
WIDTH = 3  # elements of one layer's slice


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


@st.composite
def layouts(draw: st.DrawFn) -> HybridGroups:
    p, t, d = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.sampled_from([1, 2, 4, 6, 8])), draw(st.integers(1, 3))
    return plan_hybrid_groups(p, t, d, draw(st.sampled_from(divisors(p))), draw(st.sampled_from(divisors(t))))


def elements(plan: HybridGroups, piece: tuple[int, int]) -> list[tuple[int, int]]:
    """(layer, flat index) of every element of a piece."""
    stage, slice_ = piece
    return [
        (layer, slice_ * WIDTH + i)
        for layer in range(stage * LAYERS_A_STAGE, (stage + 1) * LAYERS_A_STAGE)
        for i in range(WIDTH)
    ]


def part(plan: HybridGroups, pieces: tuple[tuple[int, int], ...]) -> set[tuple[int, int]]:
    return {element for piece in pieces for element in elements(plan, piece)}


def model(plan: HybridGroups) -> set[tuple[int, int]]:
    return {(layer, i) for layer in range(plan.p * LAYERS_A_STAGE) for i in range(plan.t * WIDTH)}


@given(layouts())
def test_the_training_part_lies_in_the_generation_part(plan: HybridGroups) -> None:
    for rank in range(plan.world_size):
        assert part(plan, (plan.train_piece[rank],)) <= part(plan, plan.gen_pieces[rank])
        # The generation part is what the formula says: neighbouring stages and slices.
        pi_g, tau_g = plan.slot_of(rank)
        b, a = plan.p // plan.p_g, plan.t // plan.t_g
        want = {(pi, tau) for pi in range(pi_g * b, (pi_g + 1) * b) for tau in range(tau_g * a, (tau_g + 1) * a)}
        assert set(plan.gen_pieces[rank]) == want


@given(layouts())
def test_a_micro_dp_group_holds_its_part_once(plan: HybridGroups) -> None:
    for group in plan.micro_dp:
        assert len(group) == plan.d_g
        tags = [tag for rank in group for tag in elements(plan, plan.train_piece[rank])]
        assert len(tags) == len(set(tags))
        for rank in group:
            assert set(tags) == part(plan, plan.gen_pieces[rank])


@given(layouts())
def test_received_bytes_are_what_is_missing(plan: HybridGroups) -> None:
    size = len(model(plan))
    for rank in range(plan.world_size):
        received = [tag for _, piece in plan.recv_pieces[rank] for tag in elements(plan, piece)]
        have, want = part(plan, (plan.train_piece[rank],)), part(plan, plan.gen_pieces[rank])
        assert len(received) == len(want) - len(have) == pytest.approx(plan.bytes(size).received)
        assert set(received) == want - have
        assert all(plan.train_piece[source] == piece for source, piece in plan.recv_pieces[rank])


@given(layouts())
def test_the_training_part_is_a_view_of_the_gathered_buffer(plan: HybridGroups) -> None:
    peers = {rank: group for group in plan.micro_dp for rank in group}
    size = LAYERS_A_STAGE * WIDTH
    for rank in range(plan.world_size):
        buffer = np.zeros(plan.d_g * size, dtype=np.int64)
        pieces = buffer.reshape(plan.d_g, size)
        own = pieces[peers[rank].index(rank)]
        own[:] = before = np.arange(size) + 1000 * rank
        for source, _ in plan.recv_pieces[rank]:
            pieces[peers[rank].index(source)] = np.arange(size) + 1000 * source
        # One storage of the size of the generation part; nothing beside it.
        assert own.base is not None and np.shares_memory(own, buffer)
        assert buffer.size == len(part(plan, plan.gen_pieces[rank]))
        assert buffer.size == pytest.approx(plan.bytes(len(model(plan))).peak)
        # Leaving generation keeps the training part, bit for bit.
        assert np.array_equal(own, before) and own.size == len(part(plan, (plan.train_piece[rank],)))


@given(layouts())
def test_every_replica_is_one_model(plan: HybridGroups) -> None:
    assert set(plan.replica_of) == set(range(plan.d * plan.d_g))
    for replica in set(plan.replica_of):
        ranks = [rank for rank in range(plan.world_size) if plan.replica_of[rank] == replica]
        assert len(ranks) == plan.p_g * plan.t_g
        # A distinct place each, and together the model once.
        assert len({plan.slot_of(rank) for rank in ranks}) == len(ranks)
        tags = [tag for rank in ranks for tag in part(plan, plan.gen_pieces[rank])]
        assert len(tags) == len(set(tags)) and set(tags) == model(plan)


@given(layouts())
def test_groups_partition_the_ranks(plan: HybridGroups) -> None:
    for groups, size in ((plan.gen_tp, plan.t_g), (plan.gen_pp, plan.p_g), (plan.micro_dp, plan.d_g)):
        assert sorted(rank for group in groups for rank in group) == list(range(plan.world_size))
        assert {len(group) for group in groups} == {size}
    for group in plan.gen_tp:
        assert len({plan.replica_of[rank] for rank in group}) == 1
        assert [plan.slot_of(rank)[1] for rank in group] == list(range(plan.t_g))
    for group in plan.gen_pp:
        assert len({plan.replica_of[rank] for rank in group}) == 1
        assert [plan.slot_of(rank)[0] for rank in group] == list(range(plan.p_g))


def test_the_example_of_eight_ranks() -> None:
    plan = plan_hybrid_groups(1, 4, 2, 1, 2)
    assert sorted(plan.gen_tp) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert sorted(plan.micro_dp) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert plan.recv_pieces[0] == ((1, (0, 1)),) and plan.recv_pieces[7] == ((6, (0, 2)),)


def test_bytes_of_a_7b_model() -> None:
    cost = plan_hybrid_groups(1, 8, 1, 1, 2).bytes(14_000_000_000)
    assert cost.received == 5.25e9 and cost.training_group_gather == 12.25e9
    assert cost.peak == 7e9 and cost.total == 8 * 5.25e9
    assert plan_hybrid_groups(2, 4, 3, 2, 4).bytes(14_000_000_000).received == 0


@pytest.mark.parametrize("sizes", [(1, 4, 1, 1, 3), (3, 2, 1, 2, 2), (1, 2, 1, 1, 4), (1, 0, 1, 1, 1)])
def test_sizes_that_do_not_divide_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must"):
        plan_hybrid_groups(*sizes)
