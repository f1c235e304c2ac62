"""The samplers, called directly and as the choice of a table."""

from __future__ import annotations

from typing import Any

from case_tools import case, numbers, polling_with


def at(rank: int, index: int, **more: Any) -> dict[str, Any]:
    return {"dp_rank": rank, "batch_index": index, "task_name": "t", "partition_id": "p", **more}


@case
def sequential_sampler(tq, see, partition):
    sampler = tq.SequentialSampler()
    see("first rows", lambda: sampler.sample([3, 1, 2], 2))
    see("called", lambda: sampler([3, 1, 2], 2))
    see("too few", lambda: sampler.sample([1], 2))
    see("none", lambda: sampler.sample([], 2))
    see("keywords", lambda: sampler.sample([1, 2], 1, task_name="t", partition_id="p"))
    see("cached", lambda: sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 0}))
    see("state", lambda: sampler.save_checkpoint())


@case
def base_sampler(tq, see, partition):
    see("is abstract", lambda: tq.BaseSampler())

    class Last(tq.BaseSampler):
        def sample(self, ready_indexes, batch_size, *args, **kwargs):
            return ready_indexes[-batch_size:], ready_indexes[-batch_size:]

    sampler = Last()
    see("own sampler", lambda: sampler([1, 2, 3], 2))
    sampler._states = {"p": {"t": {0: {0: ([1], [1])}}}}
    see("cached", lambda: sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 0}))
    see("not cached", lambda: sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 1}))
    see("without dp_rank", lambda: sampler.has_cached_result("p", "t", {"batch_index": 0}))
    see("without batch_index", lambda: sampler.has_cached_result("p", "t", {"dp_rank": 0}))
    see("without config", lambda: sampler.has_cached_result("p", "t"))
    see("clear", lambda: sampler.clear_cache("p"))
    see("after clear", lambda: sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 0}))
    see("clear unknown", lambda: sampler.clear_cache("q"))


@case
def group_sampler(tq, see, partition):
    sampler = tq.GRPOGroupNSampler(n_samples_per_prompt=2)
    see("whole groups", lambda: sampler.sample([0, 1, 2, 3, 4, 5], 4))
    see("unsorted", lambda: sampler.sample([5, 0, 4, 1], 4))
    see("skips incomplete groups", lambda: sampler.sample([0, 2, 3, 5, 6], 4))
    see("too few groups", lambda: sampler.sample([0, 2, 3], 4))
    see("no multiple", lambda: sampler.sample([0, 1, 2, 3], 3))
    see("default n", lambda: tq.GRPOGroupNSampler().sample([3, 1, 2], 2))
    see("n of 0", lambda: tq.GRPOGroupNSampler(0))
    see("rank 0", lambda: sampler.sample([0, 1, 2, 3], 2, **at(0, 0)))
    see("rank 0 again", lambda: sampler.sample([2, 3], 2, **at(0, 0)))
    see("rank 1", lambda: sampler.sample([2, 3], 2, **at(1, 0)))
    see("cached", lambda: sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 0}))
    see("not cached", lambda: sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 1}))
    sampler.clear_cache("p")
    see("after clear", lambda: sampler.sample([2, 3], 2, **at(0, 0)))


@case
def rank_aware_sampler(tq, see, partition):
    sampler = tq.RankAwareSampler()
    see("first rank", lambda: sampler.sample([0, 1, 2, 3], 2, **at(0, 0)))
    see("same rank again", lambda: sampler.sample([2, 3], 2, **at(0, 0)))
    see("next batch", lambda: sampler.sample([2, 3], 2, **at(0, 1)))
    see("other rank", lambda: sampler.sample([4, 5], 2, **at(1, 0)))
    see("too few", lambda: sampler.sample([4], 2, **at(1, 1)))
    see("without rank", lambda: sampler.sample([4, 5], 2))
    see("cached", lambda: sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 1}))


class _Tags:
    """The status object a controller would pass: tags of rows."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self.custom_meta = {row: {"total_lengths": length} for row, length in enumerate(lengths)}

    def get_custom_meta(self, rows: list[int]) -> dict[int, dict[str, Any]]:
        return {row: self.custom_meta[row] for row in rows}


@case
def seqlen_sampler(tq, see, partition):
    sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2)
    state = _Tags([1, 1, 9, 9, 2, 2, 8, 8])
    see("rank 0", lambda: sampler.sample(list(range(8)), 4, **at(0, 0), partition=state))
    see("rank 1", lambda: sampler.sample([], 4, **at(1, 0), partition=state))
    see("rank 0 again", lambda: sampler.sample([], 4, **at(0, 0), partition=state))
    see("too few", lambda: sampler.sample([0, 1], 4, **at(0, 1), partition=state))
    see("without lengths", lambda: sampler.sample(list(range(8)), 2, **at(0, 2)))
    see("no multiple", lambda: sampler.sample(list(range(8)), 3, **at(0, 3), partition=state))
    see("cached", lambda: sampler.has_cached_result("p", "t", {"dp_rank": 1, "batch_index": 0}))


@case
def seqlen_sampler_shares(tq, see, partition):
    lengths = [9, 9, 1, 1, 5, 5, 2, 2, 7, 3, 4, 4, 6, 1, 8, 2]
    rows, state = list(range(len(lengths))), _Tags(lengths)

    def share(sampler: Any, size: int, **place: Any) -> Any:
        return lambda: sampler.sample(rows, size, partition=state, **place)

    for ranks in (2, 4):
        sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=ranks)
        for rank in range(ranks):
            see(f"{ranks} ranks, {rank}", share(sampler, len(rows) // ranks, **at(rank, 0)))
        see(f"{ranks} ranks, without a rank", share(sampler, 4))


def fetch(client: Any, partition: str, size: int, rank: int, index: int) -> list[int]:
    config = {"dp_rank": rank, "batch_index": index, "task_name": "task", "partition_id": partition}
    return client.get_meta(["n"], size, partition, "fetch", "task", config)


@case
@polling_with(lambda tq: tq.GRPOGroupNSampler(2))
def fetch_of_groups(tq, see, partition):
    client = tq.get_client()
    client.put(numbers(0, 1, 2, 3, 4), partition_id=partition)
    see("rank 0", lambda: client.get_data(fetch(client, partition, 2, 0, 0)))
    see("rank 0 again", lambda: client.get_data(fetch(client, partition, 2, 0, 0)))
    see("rank 1", lambda: client.get_data(fetch(client, partition, 2, 1, 0)))
    see("no whole group left", lambda: fetch(client, partition, 2, 0, 1))
    see("without a rank", lambda: client.get_meta(["n"], 2, partition, "fetch", "other").size)
    see("no multiple", lambda: client.get_meta(["n"], 3, partition, "fetch", "third"))
    client.clear_partition(partition)
    client.put(numbers(7, 8), partition_id=partition)
    see("after a clear", lambda: client.get_data(fetch(client, partition, 2, 0, 0)))


@case
@polling_with(lambda tq: tq.RankAwareSampler)
def fetch_by_rank(tq, see, partition):
    client = tq.get_client()
    client.put(numbers(0, 1, 2, 3), partition_id=partition)
    see("first of rank 0", lambda: client.get_data(fetch(client, partition, 2, 0, 0)))
    see("second of rank 0", lambda: client.get_data(fetch(client, partition, 2, 0, 0)))
    see("rank 1", lambda: client.get_data(fetch(client, partition, 2, 1, 0)))
    see("next batch", lambda: fetch(client, partition, 2, 0, 1))
    see("consumed", lambda: client.check_consumption_status("task", partition))
    see("without a rank", lambda: client.get_meta(["n"], 2, partition, "fetch", "other"))
    place = {"dp_rank": 0, "batch_index": 0}
    see("task left out", lambda: client.get_meta(["n"], 2, partition, "fetch", "o", place).size)


@case
@polling_with(lambda tq: tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2))
def fetch_balanced(tq, see, partition):
    client = tq.get_client()
    meta = client.put(numbers(0, 1, 2, 3, 4, 5, 6, 7), partition_id=partition)
    meta.update_custom_meta([{"total_lengths": length} for length in (5, 5, 1, 1, 7, 7, 2, 2)])
    client.set_custom_meta(meta)
    see("rank 0", lambda: client.get_data(fetch(client, partition, 4, 0, 0)))
    see("rank 1", lambda: client.get_data(fetch(client, partition, 4, 1, 0)))
    see("nothing left", lambda: fetch(client, partition, 4, 0, 1))


def last_rows(tq: Any) -> Any:
    class Last(tq.BaseSampler):
        def sample(self, ready_indexes, batch_size, *args, **kwargs):
            return ready_indexes[-batch_size:], ready_indexes[-batch_size:]

    return Last()


@case
@polling_with(last_rows)
def own_sampler(tq, see, partition):
    client = tq.get_client()
    client.put(numbers(0, 1, 2, 3), partition_id=partition)
    see("last rows", lambda: client.get_data(client.get_meta(["n"], 3, partition, "fetch", "task")))
    see("too few", lambda: client.get_meta(["n"], 3, partition, "fetch", "task").size)
