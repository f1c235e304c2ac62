"""A storage unit dies while trajectories are made: its prompts start again, and the run ends as if nothing had been."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import rlflow.transfer_queue as tq
from rlflow.observe.journal import JOURNAL, read_lines
from rlflow.trainer.ppo.trainer_sync import PPOTrainerSync
from rlflow.transfer_queue.tags import LOST
from rlflow.utils.ray_utils import ray_get


def storage_pid() -> int:
    import ray

    (unit,) = [
        each
        for each in ray.util.list_named_actors(all_namespaces=True)
        if each["name"].startswith("TransferQueueStorageUnit#0")
    ]
    return ray_get(ray.get_actor(**unit).__ray_call__.remote(lambda _: os.getpid()), what="a pid", timeout_s=30)


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class Unlucky(PPOTrainerSync):
    """The first step loses the storage in the middle of its rollout, and knows it when it looks for trajectories."""

    def on_sample_begin(self) -> None:
        if self.global_steps == 1:
            pid, stats = storage_pid(), tq.get_client().async_stats
            until(lambda: sum(unit["blocks"] for unit in asyncio.run(stats())["units"]), "a trajectory is stored")
            os.kill(pid, signal.SIGKILL)
            until(lambda: any(LOST in tag for tag in tq.kv_list("train")["train"].values()), "the loss is known")


def test_prompts_start_again_when_their_rows_are_lost(run_trainer, tiny_overrides, read_metrics, tmp_path: Path):
    run_trainer([*tiny_overrides, "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"], Unlucky)
    events = list(read_lines(tmp_path / "checkpoints" / JOURNAL))
    again = [event for event in events if event["event"] == "restart"]
    assert again and all("start again" in event["text"] for event in again)
    issued = [uid for event in events if event["event"] == "issued" and event["step"] == 1 for uid in event["uids"]]
    assert len(issued) > len(set(issued)) == 4, "some of the four prompts were issued twice"
    trained = [event["uids"] for event in events if event["event"] == "trained"]
    assert [len(uids) for uids in trained] == [4, 4] and set(trained[0]) == set(issued)
    assert [line["step"] for line in read_metrics()] == [1, 2]
    assert not [event for event in events if event["event"] == "fault"]
