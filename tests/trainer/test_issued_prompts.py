"""Prompts that lost trajectories with a storage unit start again; everything else stays as it is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import rlflow.transfer_queue as tq
from rlflow.trainer.ppo.issued_prompts import IssuedPrompts, LostGroups
from rlflow.trainer.ppo.replay_buffer import PartitionView
from rlflow.transfer_queue.tags import LOST as LOST_TAG
from rlflow.utils import tensordict_utils as tu


def batch_of(*uids: str, step: int = 3):
    columns = {
        "uid": np.array(uids, dtype=object),
        "raw_prompt": np.fromiter(([{"role": "user", "content": uid}] for uid in uids), dtype=object, count=len(uids)),
    }
    return tu.get_tensordict(columns, {"global_steps": step, "validate": False})


def contents(batch) -> list[str]:
    prompts = tu.unwrap_non_tensor_data(batch.get("raw_prompt"))
    return [prompt[0]["content"] for prompt in (prompts if isinstance(prompts[0], list) else [prompts])]


def test_issued_prompts_come_back_with_the_options_of_their_batch() -> None:
    issued = IssuedPrompts()
    issued.add(batch_of("a", "b", "c", step=3), ["a", "b", "c"])
    issued.add(batch_of("d", step=4), ["d"])
    first, second = issued.batches(["c", "d", "a"])
    assert contents(first) == ["c", "a"] and tu.get(first, "global_steps") == 3
    assert contents(second) == ["d"] and tu.get(second, "global_steps") == 4
    issued.forget(["a", "never there"])
    with pytest.raises(KeyError):
        issued.batches(["a"])


@pytest.fixture
def view() -> Iterator[PartitionView]:
    tq.init({"backend": {"storage_backend": "Local"}})
    tags = {}
    for uid in ("p0", "p1", "p2"):
        tags[uid] = {"is_prompt": True, "status": "running"}
        tags |= {f"{uid}_{session}_0": {"status": "success"} for session in range(2)}
    tq.kv_batch_put(list(tags), "train", tags=list(tags.values()))
    partition = PartitionView("train")
    partition.wait(0.0)
    yield partition
    tq.close()


def test_a_lost_group_is_cleared_and_issued_again_once_it_has_ended(view: PartitionView) -> None:
    asked: list[tuple[str, list[str]]] = []
    groups = LostGroups(lambda partition, uids: asked.append((partition, uids)))
    groups.observe(
        {"p1_0_0": {"status": "success", LOST_TAG: ["responses"]}, "p0_1_0": {"status": "success"}, "x": None}
    )
    assert groups.restart(view, ["p0"]) == [] and asked == [], "sessions of p1 still run"
    assert groups.restart(view, ["p0", "p1"]) == ["p1"]
    assert asked == [("train", ["p1"])]
    left = ["p0", "p0_0_0", "p0_1_0", "p2", "p2_0_0", "p2_1_0"]
    assert list(tq.kv_list("train")["train"]) == left and list(view.tags) == left
    assert groups.restart(view, ["p0", "p1"]) == [], "the new attempt has lost nothing"


def test_a_prompt_that_ends_within_its_new_attempt_counts(view: PartitionView) -> None:
    view.tags["p2"] = {"is_prompt": True, "status": "finished"}
    groups = LostGroups(lambda partition, uids: None)
    groups.observe({"p2_1_0": {LOST_TAG: ["responses"]}})
    assert groups.restart(view, ["p2"]) == ["p2"]
    tq.kv_batch_put(
        ["p2", "p2_0_0"],
        "train",
        fields=tu.list_of_dict_to_tensordict([{"responses": torch.arange(2)}] * 2),
        tags=[{"is_prompt": True, "status": "finished"}, {"status": "success"}],
    )
    changes = view.wait(1.0)
    groups.observe(changes)
    assert groups.restart(view, ["p2"]) == []
