"""Sampling waits for whole groups, wakes on events, and says what it waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

import rlflow.transfer_queue as tq
from rlflow.trainer.ppo import batching
from rlflow.trainer.ppo.replay_buffer import ReplayBuffer
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError, DeadlineError
from rlflow.utils.nested import nested_lengths


@pytest.fixture
def queue(ray_cluster: None) -> Iterator[None]:
    tq.init()
    yield
    tq.close()


def submit(*uids: str, step: int = 1) -> None:
    tq.kv_batch_put(
        list(uids), "train", tags=[{"is_prompt": True, "status": "pending", "global_steps": step} for _ in uids]
    )


def finish(uid: str, sessions: int = 2, status: str = "finished", **more: object) -> None:
    if sessions:
        rows = [{"responses": torch.arange(3), "uid": uid} for _ in range(sessions)]
        tags = [{"status": "success", "seq_len": 5} for _ in range(sessions)]
        keys = [f"{uid}_{session}_0" for session in range(sessions)]
        tq.kv_batch_put(keys, "train", fields=tu.list_of_dict_to_tensordict(rows), tags=tags)
    tq.kv_put(uid, "train", tag={"status": status, **more})


def test_sample_wakes_when_the_last_group_ends_and_returns_whole_groups_in_submission_order(queue: None) -> None:
    submit("e0r10a0", "e0r9a0")
    finish("e0r10a0")

    def late() -> None:
        time.sleep(0.3)
        finish("e0r9a0")

    thread = threading.Thread(target=late)
    thread.start()
    started = time.monotonic()
    progress: list[tuple[int, int]] = []
    buffer = ReplayBuffer(stall_timeout_s=30, on_progress=lambda done, total: progress.append((done, total)))
    meta, metrics = buffer.sample(1, "train", 2)
    thread.join()
    assert time.monotonic() - started < 2.0, "woken by the event, not by a poll interval"
    assert meta.keys == ["e0r9a0_0_0", "e0r9a0_1_0", "e0r10a0_0_0", "e0r10a0_1_0"]
    assert meta.fields is None and metrics == {}
    assert progress == sorted(progress) and progress[0] == (0, 2) and progress[-1] == (2, 2)
    assert sorted(tq.kv_list("train")["train"]) == sorted(meta.keys), "markers gone, rows still there"


def test_older_submissions_come_first_and_the_rest_stays(queue: None) -> None:
    submit("e0r1a0", step=2)
    submit("e0r2a0", step=1)
    finish("e0r1a0")
    finish("e0r2a0")
    buffer = ReplayBuffer()
    assert buffer.sample(2, "train", 1)[0].keys == ["e0r2a0_0_0", "e0r2a0_1_0"]
    assert buffer.sample(2, "train", 1)[0].keys == ["e0r1a0_0_0", "e0r1a0_1_0"]


def test_a_failed_group_is_kept_with_what_it_has_and_counted(queue: None) -> None:
    submit("e0r1a0", "e0r2a0")
    finish("e0r1a0", sessions=1, status="failure", failed_sessions=1, failed="boom")
    finish("e0r2a0")
    meta, metrics = ReplayBuffer().sample(1, "train", 2)
    assert len(meta) == 3
    assert metrics == {"training/rollout_failure/groups": 1, "training/rollout_failure/sessions": 1}


def test_a_step_without_any_trajectory_names_the_reason(queue: None) -> None:
    submit("e0r1a0")
    finish("e0r1a0", sessions=0, status="failure", failed="ValueError: no such tool")
    with pytest.raises(ContractError, match="no such tool"):
        ReplayBuffer().sample(1, "train", 1)


def test_a_stall_ends_with_a_report(queue: None) -> None:
    submit("e0r1a0", "e0r2a0")
    finish("e0r1a0")
    buffer = ReplayBuffer(stall_timeout_s=0.3, describe_stall=lambda: ["running: e0r2a0, session 1"])
    with pytest.raises(DeadlineError, match=r"(?s)step 7, partition train.*1 of 2 prompt groups.*e0r2a0, session 1"):
        buffer.sample(7, "train", 2)


def test_an_unknown_status_is_refused(queue: None) -> None:
    submit("e0r1a0")
    tq.kv_put("e0r1a0", "train", tag={"status": "odd"})
    with pytest.raises(ContractError, match="odd"):
        ReplayBuffer().sample(1, "train", 1)


def test_validation_never_sees_training_rows(queue: None) -> None:
    submit("e0r1a0")
    finish("e0r1a0")
    with pytest.raises(DeadlineError):
        ReplayBuffer(stall_timeout_s=0.2).sample(1, "val", 1)


def test_padding_rows_fill_up_to_the_multiple_and_balance_splits_the_work(queue: None) -> None:
    submit("e0r1a0")
    finish("e0r1a0", sessions=3)
    meta, _ = ReplayBuffer().sample(1, "train", 1)
    padded = batching.pad_batch(meta, batching.required_multiple(2, 2), eos_token_id=7, step=1)
    assert len(padded) == 4 and padded.tags[-1]["is_padding"] and padded.tags[-1]["seq_len"] == 2
    rows = tq.kv_batch_get(padded.keys, "train", ["responses"])["responses"]
    assert nested_lengths(rows).tolist() == [3, 3, 3, 1]
    metrics: dict[str, float] = {}
    balanced = batching.balance(padded, 2, metrics)
    assert sorted(balanced.keys) == sorted(padded.keys)
    assert metrics["global_seqlen/mean"] == 8.5
    assert len(batching.real_rows(balanced)) == 3
    assert batching.pad_batch(padded, 2, 7, 1) is padded


def test_a_view_that_is_too_far_behind_looks_at_everything_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlflow.trainer.ppo.replay_buffer import PartitionView
    from rlflow.transfer_queue import changes as log

    monkeypatch.setattr(log, "MAX_TOMBSTONES", 2)
    tq.init({"namespace": "local-view", "backend": {"storage_backend": "Local"}})
    try:
        view = PartitionView("train")
        submit("a", "b", "c")
        assert set(view.wait(1.0)) == {"a", "b", "c"}
        for _ in range(3):  # more deletions than the table remembers
            submit("x", "y", "z")
            tq.kv_clear(["x", "y", "z"], "train")
        tq.kv_clear(["a"], "train")
        submit("d")
        changes = view.wait(1.0)
        assert changes["a"] is None and changes["d"] is not None
        assert set(view.tags) == {"b", "c", "d"}
        submit("e")
        assert set(view.wait(1.0)) == {"e"}
    finally:
        tq.close()
