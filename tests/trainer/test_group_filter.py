"""Dynamic sampling: what is dropped, what comes in its place, and where it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch

import rlflow.transfer_queue as tq
from rlflow.trainer.ppo.group_filter import GroupFilter, max_prompts
from rlflow.trainer.ppo.issued_prompts import LostGroups
from rlflow.trainer.ppo.replay_buffer import ReplayBuffer
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import RewardError

Scores = list[float | None]


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    tq.init({"namespace": "group-filter", "backend": {"storage_backend": "Local"}})
    yield
    tq.close()


class Stream:
    """Prompts in the order of the data, each with the `acc` of its sessions (None: an invalid reward)."""

    def __init__(self, groups: Callable[[int], Scores], **options: object) -> None:
        self.groups = groups
        self.dropped: dict[str, str] = {}
        self.refills: list[int] = []
        self.numbers = count()
        self.held: list[str] | None = None  # prompts that do not end yet
        keywords = {"max_prompts": 100, "refill": self.refill, "on_dropped": self.dropped.__setitem__, **options}
        self.filter = GroupFilter("acc", **keywords)  # type: ignore[arg-type]
        self.buffer = ReplayBuffer(stall_timeout_s=1.0, group_filter=self.filter)

    def refill(self, prompts: int) -> None:
        self.refills.append(prompts)
        self.submit(prompts)

    def submit(self, prompts: int) -> None:
        uids = [f"e0r{next(self.numbers)}a0" for _ in range(prompts)]
        tq.kv_batch_put(uids, "train", tags=[{"is_prompt": True, "status": "pending", "global_steps": 1}] * prompts)
        for uid in uids:
            if self.held is None:
                self.end(uid)
            else:
                self.held.append(uid)

    def end(self, uid: str) -> None:
        scores = self.groups(int(uid[3:-2]))
        rows, tags = [], []
        for score in scores:
            info = {} if score is None else {"acc": score, "pred": "x"}
            rows.append({"responses": torch.arange(3), "extra_fields": {"reward_extra_info": info}})
            tags.append({"seq_len": 5} | ({"invalid": "no score"} if score is None else {}))
        keys = [f"{uid}_{session}_0" for session in range(len(scores))]
        if keys:
            tq.kv_batch_put(keys, "train", fields=tu.list_of_dict_to_tensordict(rows), tags=tags)
        status = "finished" if keys else "failure"
        tq.kv_put(uid, "train", tag={"status": status} | ({} if keys else {"failed": "boom", "failed_sessions": 2}))

    def sample(self, batch_size: int) -> tuple[list[str], dict[str, int]]:
        self.submit(batch_size)
        meta, metrics = self.buffer.sample(1, "train", batch_size)
        return meta.keys, metrics


def signal_every(n: int) -> Callable[[int], Scores]:
    return lambda row: [0.0, 1.0] if row % n == 0 else [1.0, 1.0]


def test_groups_without_a_signal_are_replaced_by_the_next_prompts() -> None:
    stream = Stream(signal_every(3))
    keys, metrics = stream.sample(2)
    assert keys == ["e0r0a0_0_0", "e0r0a0_1_0", "e0r3a0_0_0", "e0r3a0_1_0"]
    assert set(stream.dropped) == {"e0r1a0", "e0r2a0"}, "rows 0 to 3: the shortest stretch with two groups"
    assert set(stream.dropped.values()) == {"algorithm.filter_groups: acc is 1 in all sessions"}
    assert metrics == {
        "training/filter_groups/evicted_samples": 4,
        "training/filter_groups/evicted_groups": 2,
        "training/filter_groups/refilled_prompts": 2,
    }
    assert sorted(tq.kv_list("train")["train"]) == sorted(keys), "dropped rows and all markers are gone"


def test_the_counts_begin_anew_each_step() -> None:
    stream = Stream(lambda row: [0.0, 1.0] if row else [0.0, 0.0])
    _, first = stream.sample(1)
    keys, second = stream.sample(1)
    assert first["training/filter_groups/evicted_groups"] == 1 and second == {}
    assert keys == ["e0r2a0_0_0", "e0r2a0_1_0"]


def test_equal_up_to_the_last_bit_is_dropped_and_anything_else_stays() -> None:
    stream = Stream(lambda row: [0.1, 0.1] if row == 0 else [0.1, 0.1 + 1e-16 * 2])
    assert stream.sample(1)[0][0].startswith("e0r1a0")


def test_one_valid_session_cannot_vary_and_stays_and_none_is_dropped() -> None:
    stream = Stream(lambda row: [None, None] if row == 0 else [None, 1.0])
    keys, _ = stream.sample(1)
    assert keys == ["e0r1a0_0_0", "e0r1a0_1_0"]
    assert stream.dropped == {"e0r0a0": "algorithm.filter_groups: no session has a valid reward"}


def test_a_prompt_that_failed_is_replaced_too_and_counted_as_failed() -> None:
    stream = Stream(lambda row: [] if row == 0 else [0.0, 1.0])
    keys, metrics = stream.sample(1)
    assert keys[0].startswith("e0r1a0") and "boom" in stream.dropped["e0r0a0"]
    assert metrics["training/rollout_failure/sessions"] == 2


def test_all_that_is_in_flight_ends_before_the_batch_is_taken_and_the_surplus_goes() -> None:
    stream = Stream(lambda row: [1.0, 1.0] if row == 0 else [0.0, 1.0], per_dropped=3)
    keys, metrics = stream.sample(1)
    assert stream.refills == [3] and keys[0].startswith("e0r1a0")
    assert metrics["training/filter_groups/discarded_surplus_samples"] == 4
    assert "the batch was full" in stream.dropped["e0r2a0"] and set(stream.dropped) == {"e0r0a0", "e0r2a0", "e0r3a0"}


@pytest.mark.parametrize(("in_waves", "refills"), [(False, [1, 1]), (True, [2])])
def test_waves_wait_until_nothing_is_in_flight(in_waves: bool, refills: list[int]) -> None:
    stream = Stream(lambda row: [1.0, 1.0] if row < 2 else [0.0, 1.0], in_waves=in_waves)
    stream.held = []
    stream.submit(2)
    stream.filter.begin(2)
    from rlflow.trainer.ppo.replay_buffer import PartitionView

    view = PartitionView("train")
    for uid in ("e0r0a0", "e0r1a0"):
        stream.end(uid)
        view.wait(1.0)
        assert stream.filter.sift(view, [uid]) is None
    assert stream.refills == refills
    for uid in ("e0r2a0", "e0r3a0"):
        stream.end(uid)
    view.wait(1.0)
    assert stream.filter.sift(view, ["e0r2a0", "e0r3a0"]) == ["e0r2a0", "e0r3a0"]


def test_data_without_a_signal_ends_with_what_the_groups_scored() -> None:
    stream = Stream(lambda row: [1.0, 1.0] if row else [0.0, 0.0], max_prompts=6)
    with pytest.raises(RewardError, match=r"(?s)0 of 2 groups vary in acc after 6 prompts.*5 x acc is 1.*1 x acc is 0"):
        stream.sample(2)
    assert sum(stream.refills) == 4


def test_a_missing_metric_names_the_trajectory_and_what_there_is() -> None:
    stream = Stream(signal_every(1))
    stream.filter.metric = "format"
    with pytest.raises(RewardError, match=r"metric names format.*e0r0a0_0_0 no such number. It returned acc\."):
        stream.sample(1)
    stream = Stream(signal_every(1))
    stream.filter.metric = "pred"
    with pytest.raises(RewardError, match="e0r0a0_0_0 'x' under it"):
        stream.sample(1)


def test_rows_that_are_lost_before_they_are_judged_start_again() -> None:
    class Again(Exception):
        pass

    def reissue(partition: str, uids: list[str]) -> None:
        raise Again(partition, *uids)

    async def lost() -> None:
        await tq.get_client().controller.call("unit_lost", 0, "killed")

    def lose(*_: object) -> None:
        asyncio.run(lost())  # the view has seen the groups end; their rows are not read yet

    stream = Stream(signal_every(1))
    stream.buffer = ReplayBuffer(
        stall_timeout_s=5.0, group_filter=stream.filter, on_ended=lose, lost_groups=LostGroups(reissue)
    )
    with pytest.raises(Again) as again:
        stream.sample(2)
    assert again.value.args == ("train", "e0r0a0", "e0r1a0")


def test_validation_is_not_filtered() -> None:
    stream = Stream(signal_every(1))
    rows = [{"responses": torch.arange(3)}]
    tq.kv_batch_put(["v1r0a0_0_0"], "val", fields=tu.list_of_dict_to_tensordict(rows), tags=[{"seq_len": 5}])
    tq.kv_put("v1r0a0", "val", tag={"is_prompt": True, "status": "finished", "global_steps": 1})
    assert stream.buffer.sample(1, "val", 1)[0].keys == ["v1r0a0_0_0"]


def test_the_bound_of_a_step_in_prompts() -> None:
    assert max_prompts(3, 8, 1000) == 24
    assert max_prompts(0, 8, 40) == 80, "0: ten batches"
    assert max_prompts(0, 8, 1000) == 1000, "and at least one pass over the data"
