"""The cursor: a resumed run sees what an unbroken run would have seen."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.data import EpochSampler, PromptLoader, create_rl_sampler, create_train_loader, iterate_validation
from rlflow.data.loader import make_uid
from rlflow.utils.errors import ContractError, DataError


class Rows:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, item: int) -> dict:
        return {"text": f"row {item}"}


def uids(rows: list[dict]) -> list[str]:
    return [row["uid"] for row in rows]


def round_trip(state: dict) -> dict:
    return json.loads(json.dumps(state))


sizes = st.integers(1, 40)
seeds = st.integers(-5, 2**40)


@given(size=sizes, seed=seeds, epoch=st.integers(0, 5), shuffle=st.booleans())
def test_the_order_of_an_epoch_is_a_permutation_and_depends_on_nothing_else(size, seed, epoch, shuffle):
    moved = EpochSampler(size, seed, shuffle)
    for _ in range(size * 2 + 1):
        moved.next()
    order = EpochSampler(size, seed, shuffle).order(epoch)
    assert sorted(order) == list(range(size))
    assert list(order) == list(moved.order(epoch))
    assert shuffle or list(order) == list(range(size))


def test_orders_differ_between_epochs_and_seeds_and_never_change_between_releases():
    sampler = EpochSampler(10, seed=7)
    assert list(sampler.order(0)) != list(sampler.order(1)) != list(EpochSampler(10, seed=8).order(1))
    assert sampler.order(0).tolist() == [6, 4, 8, 5, 1, 9, 2, 7, 3, 0]


@given(size=sizes, seed=seeds, steps=st.integers(0, 100), more=st.integers(1, 60))
def test_a_sampler_resumes_anywhere(size, seed, steps, more):
    unbroken = EpochSampler(size, seed)
    for _ in range(steps):
        unbroken.next()
    resumed = EpochSampler(size, seed)
    resumed.load_state_dict(round_trip(unbroken.state_dict()))
    assert [resumed.next() for _ in range(more)] == [unbroken.next() for _ in range(more)]


def test_iterating_a_sampler_ends_with_the_epoch():
    sampler = EpochSampler(4, shuffle=False)
    sampler.next()
    assert list(sampler) == [1, 2, 3]
    assert (sampler.epoch, sampler.position) == (1, 0)


@pytest.mark.parametrize("other", [dict(size=11), dict(seed=2), dict(shuffle=False)])
def test_a_cursor_of_another_order_is_refused(other):
    state = EpochSampler(10, seed=1).state_dict()
    with pytest.raises(DataError, match=f"cursor cannot be restored: {next(iter(other))}"):
        EpochSampler(**{"size": 10, "seed": 1, **other}).load_state_dict(state)


@given(size=sizes, batch=st.integers(1, 12), seed=seeds, shuffle=st.booleans(), steps=st.integers(0, 12))
@settings(deadline=None)
def test_sync_training_resumes_at_every_step(size, batch, seed, shuffle, steps):
    batch = min(batch, size)
    unbroken = PromptLoader(Rows(size), batch, shuffle, seed)
    for _ in range(steps):
        unbroken.mark_trained(uids(unbroken.next_batch()))
    resumed = PromptLoader(Rows(size), batch, shuffle, seed)
    resumed.load_state_dict(round_trip(unbroken.state_dict()))
    for _ in range(size // batch + 2):  # over the next epoch edge
        assert uids(resumed.next_batch()) == uids(unbroken.next_batch())


@given(
    size=st.integers(1, 20),
    batch=st.integers(1, 6),
    seed=seeds,
    issued=st.integers(0, 50),
    picks=st.lists(st.integers(0, 10_000), max_size=50),
)
@settings(deadline=None)
def test_prompts_trained_out_of_order_are_neither_lost_nor_repeated(size, batch, seed, issued, picks):
    batch = min(batch, size)
    before = PromptLoader(Rows(size), batch, seed=seed)
    running = uids(before.next_batch(issued))
    trained = []
    for pick in picks:
        if running:
            trained.append(running.pop(pick % len(running)))
            before.mark_trained(trained[-1:])
    after = PromptLoader(Rows(size), batch, seed=seed)
    after.load_state_dict(round_trip(before.state_dict()))
    again = uids(after.next_batch(len(running) + 5))
    assert again[: len(running)] == running  # what was running is issued again, in its order
    assert not set(again) & set(trained)
    reference = uids(PromptLoader(Rows(size), batch, seed=seed).next_batch(len(trained) + len(again)))
    assert sorted(reference) == sorted(trained + again)


def test_a_second_resume_keeps_what_was_trained_ahead():
    loader = PromptLoader(Rows(8), 4, shuffle=False)
    loader.next_batch()
    loader.mark_trained(["e0r2a0"])
    second = PromptLoader(Rows(8), 4, shuffle=False)
    second.load_state_dict(loader.state_dict())
    assert second.state_dict() == loader.state_dict()
    assert uids(second.next_batch(3)) == ["e0r0a0", "e0r1a0", "e0r3a0"]
    second.mark_trained(["e0r0a0", "e0r1a1"])  # another attempt of the same prompt
    assert second.state_dict()["position"] == 3
    assert second.state_dict()["ahead"] == []


def test_an_epoch_leaves_out_its_last_partial_batch():
    loader = PromptLoader(Rows(10), 4, shuffle=False)
    assert len(loader) == 2
    assert [row["row"] for row in loader.next_batch(10)] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    assert loader.epoch == 1


def test_rows_carry_epoch_row_and_uid():
    row = PromptLoader(Rows(3), 1, shuffle=False).next_batch()[0]
    assert row == {"text": "row 0", "uid": "e0r0a0", "epoch": 0, "row": 0}
    assert make_uid(2, 7, 1) == "e2r7a1"


def test_a_batch_size_may_change_between_runs():
    loader = PromptLoader(Rows(10), 5, shuffle=False)
    loader.mark_trained(uids(loader.next_batch(9)))
    other = PromptLoader(Rows(10), 4, shuffle=False)  # visits 8 of 10: position 9 lies in the part left out
    other.load_state_dict(loader.state_dict())
    assert uids(other.next_batch(1)) == ["e1r0a0"]


def test_marking_twice_is_harmless_and_marking_what_was_never_issued_is_an_error():
    loader = PromptLoader(Rows(4), 2, shuffle=False)
    loader.mark_trained(uids(loader.next_batch()) * 2)
    loader.mark_trained(["e0r0a0"])
    with pytest.raises(ContractError, match="e0r3a0 is marked as trained but was not issued"):
        loader.mark_trained(["e0r3a0"])
    with pytest.raises(ContractError, match="no uid of a train prompt"):
        loader.mark_trained(["v1r0a0"])


def test_too_few_rows_for_a_batch():
    with pytest.raises(DataError, match=r"data.train_batch_size=8 needs at least 8 prompts, the train data has 5"):
        PromptLoader(Rows(5), 8)


def test_loader_and_sampler_read_the_config():
    sampler = create_rl_sampler({"seed": None, "shuffle": True}, Rows(5))
    assert (sampler.seed, sampler.shuffle) == (1, True)
    config = {"train_batch_size": 4, "gen_batch_size": None, "shuffle": False, "seed": 3}
    assert create_train_loader(config, Rows(9)).batch_size == 4
    assert create_train_loader({**config, "gen_batch_size": 1}, Rows(9)).batch_size == 1
    assert create_train_loader(config, Rows(9), batch_size=2).batch_size == 2


def test_validation_visits_every_row_once():
    assert [len(part) for part in iterate_validation(Rows(7), 3)] == [3, 3, 1]
    assert [row["row"] for row in next(iterate_validation(Rows(7)))] == list(range(7))
    shuffled = [row["row"] for part in iterate_validation(Rows(7), 3, shuffle=True) for row in part]
    assert sorted(shuffled) == list(range(7))
    assert shuffled == [row["row"] for row in next(iterate_validation(Rows(7), shuffle=True))]
