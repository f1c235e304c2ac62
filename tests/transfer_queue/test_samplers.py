"""The samplers alone, and as a table's choice of rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import rlflow.transfer_queue as tq
from rlflow.transfer_queue import objects
from rlflow.transfer_queue.samplers import complete_groups, make_sampler, sampler_name
from rlflow.utils.errors import ConfigError


class Newest(tq.BaseSampler):
    """The rows put last."""

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
        rows = sorted(ready_indexes)[-batch_size:]
        return rows, rows


class Inventing(tq.BaseSampler):
    """Returns a row it was not offered."""

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
        return self.rows, self.rows


class Tags:
    """Tags of rows, without keys."""

    def __init__(self, lengths: dict[int, int]) -> None:
        self.lengths = lengths

    def get_custom_meta(self, rows: list[int]) -> dict[int, dict[str, int]]:
        return {row: {"total_lengths": self.lengths[row]} for row in rows}


rows_and_groups = st.dictionaries(st.integers(0, 60), st.one_of(st.none(), st.sampled_from("abcd")), max_size=40)


@given(rows_and_groups, st.integers(1, 4))
def test_groups_are_whole_disjoint_and_of_one_kind(group_of, size):
    rows = list(group_of)
    random.Random(0).shuffle(rows)
    groups = complete_groups(rows, size, group_of)
    members = [row for group in groups for row in group]
    assert len(members) == len(set(members))
    assert set(members) <= set(rows)
    for group in groups:
        assert len(group) == size
        kind = group_of[group[0]]
        assert all(group_of[row] == kind for row in group)
        assert kind is not None or group == list(range(group[0], group[0] + size))
    assert groups == sorted(groups)
    for kind in "abcd":
        count = sum(value == kind for value in group_of.values())
        assert sum(group_of[group[0]] == kind for group in groups) == count // size


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.randoms())
def test_balanced_shares_keep_groups_whole_and_cover_the_batch(n, ranks, groups_a_rank, draw):
    size = n * groups_a_rank
    lengths = {row: draw.randint(1, 100) for row in range(size * ranks)}
    sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=n, dp_size=ranks)
    shares = [
        sampler.sample(list(lengths), size, "t", "p", dp_rank=rank, batch_index=0, partition=Tags(lengths))[0]
        for rank in range(ranks)
    ]
    assert [len(share) for share in shares] == [size] * ranks
    assert sorted(row for share in shares for row in share) == sorted(lengths)
    for share in shares:
        assert {row // n for row in share} == {row // n for row in share[::n]}
    heaviest = max(sum(lengths[row] for row in share) for share in shares)
    unbalanced = max(sum(lengths[row] for row in range(rank * size, (rank + 1) * size)) for rank in range(ranks))
    weights = [sum(lengths[row] for row in range(i, i + n)) for i in range(0, size * ranks, n)]
    assert heaviest <= unbalanced + max(weights)


@pytest.mark.parametrize(
    "sampler",
    [tq.GRPOGroupNSampler(2), tq.RankAwareSampler(), tq.SeqlenBalancedSampler(2, 2)],
    ids=lambda sampler: type(sampler).__name__,
)
def test_state_survives_plain_bytes(sampler):
    place = {"dp_rank": 0, "batch_index": 3, "task_name": "t", "partition_id": "p"}
    chosen = sampler.sample(list(range(8)), 4, **place)
    other = make_sampler(type(sampler))
    other.load_checkpoint(objects.unpack(objects.pack(sampler.save_checkpoint())))
    assert other.has_cached_result("p", "t", place)
    assert other.sample([], 4, **place) == chosen
    sampler.clear_cache("p")
    assert not sampler.has_cached_result("p", "t", place)


def test_a_choice_is_the_callers_to_change():
    sampler = tq.RankAwareSampler()
    rows, _ = sampler.sample([1, 2], 2, 0, 0, "t", "p")
    rows.append(3)
    assert sampler.sample([], 2, 0, 0, "t", "p") == ([1, 2], [1, 2])


def test_samplers_by_name_class_and_instance():
    assert isinstance(make_sampler("RankAwareSampler"), tq.RankAwareSampler)
    assert isinstance(make_sampler(tq.GRPOGroupNSampler), tq.GRPOGroupNSampler)
    own = Newest()
    assert make_sampler(own) is own
    assert isinstance(make_sampler("rlflow.transfer_queue.samplers.SequentialSampler"), tq.SequentialSampler)
    assert [sampler_name(value) for value in (own, Newest, "x.Y")] == ["Newest", "Newest", "x.Y"]
    with pytest.raises(ValueError, match="'Nope' is unknown; try one of SequentialSampler"):
        make_sampler("Nope")
    with pytest.raises(ConfigError, match="no_such_module"):
        make_sampler("no_such_module.Sampler")
    with pytest.raises(ValueError, match="is no sampler"):
        make_sampler(7)
    with pytest.raises(ValueError, match="n_samples_per_prompt=0"):
        tq.GRPOGroupNSampler(0)
    with pytest.raises(ValueError, match="dp_size=0"):
        tq.SeqlenBalancedSampler(1, 0)


@contextmanager
def table(sampler: Any, **controller: Any) -> Iterator[Any]:
    tq.close()
    merged = tq.init(
        {
            "backend": {"storage_backend": "Local"},
            "controller": {"sampler": sampler, "polling_mode": True, **controller},
        }
    )
    assert merged.controller.sampler == sampler_name(sampler)
    yield tq.get_client()
    tq.close()


def rows(*values: int) -> TensorDict:
    return TensorDict({"n": torch.tensor(values)}, batch_size=[len(values)])


def fetched(client: Any, size: int, rank: int, index: int, task: str = "update") -> list[int]:
    place = {"dp_rank": rank, "batch_index": index}
    meta = client.get_meta(["n"], size, "train", task_name=task, sampling_config=place)
    return client.get_data(meta)["n"].tolist() if meta.size else []


def test_groups_follow_the_prompt_of_the_key_in_whatever_order_rows_arrive():
    with table(tq.GRPOGroupNSampler(2)) as client:
        for key, value in [("p1_0_0", 10), ("p2_0_0", 20), ("p2_1_0", 21), ("p3_0_0", 30), ("p1_1_0", 11)]:
            tq.kv_put(key, "train", {"n": torch.tensor(value)})
        assert fetched(client, 4, 0, 0) == [10, 11, 20, 21]
        assert fetched(client, 4, 0, 0) == [10, 11, 20, 21]  # the rank asks again
        assert fetched(client, 2, 1, 0) == []
        tq.kv_put("p3_1_0", "train", {"n": torch.tensor(31)})
        assert fetched(client, 2, 1, 0) == [30, 31]


def test_groups_follow_the_uid_tag_before_the_key():
    with table(tq.GRPOGroupNSampler(2)) as client:
        keys = ["x_0_0", "x_1_0", "x_2_0", "x_3_0"]
        tq.kv_batch_put(keys, "train", rows(0, 1, 2, 3), tags=[{"uid": uid} for uid in "abab"])
        assert fetched(client, 2, 0, 0) == [0, 2]


def test_ranks_of_one_dp_rank_share_rows_and_ranks_of_others_do_not():
    with table("RankAwareSampler") as client:
        client.put(rows(0, 1, 2, 3), partition_id="train")
        assert [fetched(client, 2, rank, 0) for rank in (0, 0, 1, 1)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
        with pytest.raises(ValueError, match="RankAwareSampler cannot work with sampling_config={}.*dp_rank"):
            client.get_meta(["n"], 2, "train", task_name="other")


def test_a_remembered_choice_of_cleared_rows_is_an_error():
    with table("RankAwareSampler") as client:
        meta = client.put(rows(0, 1), partition_id="train")
        fetched(client, 2, 0, 0)
        client.clear_samples(meta)
        with pytest.raises(tq.StorageKeyNotFoundError, match="RankAwareSampler remembers rows"):
            fetched(client, 2, 0, 0)
        client.clear_partition("train")
        client.put(rows(5, 6), partition_id="train")
        assert fetched(client, 2, 0, 0) == [5, 6]


def test_a_sampler_of_ones_own():
    with table(Newest()) as client:
        client.put(rows(0, 1, 2), partition_id="train")
        assert fetched(client, 2, 0, 0) == [1, 2]
        assert fetched(client, 2, 0, 1) == []


@pytest.mark.parametrize(
    ("chosen", "message"), [([0, 0], "chose a row twice"), ([2], "lack a requested field"), ([99], "cleared")]
)
def test_a_sampler_that_breaks_the_rules_is_named(chosen, message):
    sampler = Inventing()
    sampler.rows = chosen
    with table(sampler) as client:
        client.put(rows(0, 1), partition_id="train")
        tq.kv_put("only a tag", "train", tag={})
        with pytest.raises(tq.TransferQueueError, match=f"Inventing.*{message}"):
            fetched(client, 1, 0, 0)
        assert not client.get_consumption_status("update", "train")[1].any()


def test_a_sampler_reaches_the_controller_in_its_process(ray_cluster):
    tq.close()
    tq.init({"controller": {"sampler": tq.GRPOGroupNSampler(2), "polling_mode": True}})
    client = tq.get_client()
    client.put(rows(0, 1, 2), partition_id="train")
    assert fetched(client, 2, 0, 0) == [0, 1]
    assert fetched(client, 2, 0, 1) == []
    assert client.config["controller"]["sampler"] == "GRPOGroupNSampler"
    tq.close()


def test_what_ranks_were_given_is_part_of_a_checkpoint(tmp_path):
    with table("RankAwareSampler") as client:
        client.put(rows(0, 1, 2, 3), partition_id="train")
        assert fetched(client, 2, 0, 0) == [0, 1]
        tq.save_checkpoint(tmp_path / "table")
    with table("RankAwareSampler") as client:
        tq.load_checkpoint(tmp_path / "table")
        assert fetched(client, 2, 0, 0) == [0, 1]
        assert fetched(client, 2, 1, 0) == [2, 3]
        assert client.check_consumption_status("update", "train")
