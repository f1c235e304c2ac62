"""Token-level records: what a record says, which rows are recorded, and what it costs the controller."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import rlflow.transfer_queue as tq
from rlflow.agent_loop import AgentLoopMetrics, AgentLoopOutput
from rlflow.agent_loop.rows import ROW_FIELDS, build_rows
from rlflow.agent_loop.session import Session
from rlflow.observe.recorder import StageRecord
from rlflow.observe.records import SERIES, parse_trajectory
from rlflow.trainer.ppo.dumps import DumpWriter
from rlflow.trainer.ppo.trajectories import (
    _fetch,
    remove_trajectories_after,
    select_groups,
    trajectory_records,
)
from rlflow.utils import tensordict_utils as tu


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture
def queue(ray_cluster: None) -> Iterator[None]:
    tq.init()
    yield
    tq.close()


def stored(tokenizer: Any, uid: str, session: int, texts: list[str], invalid: str | None = None) -> Any:
    """The rows of one session with an output for each text."""
    outputs = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        outputs.append(
            AgentLoopOutput(
                prompt_ids=tokenizer.encode("2+2", add_special_tokens=False),
                response_ids=ids,
                response_mask=[1] * len(ids),
                response_logprobs=[-0.25] * len(ids),
                reward_score=0.5,
                num_turns=2,
                metrics=AgentLoopMetrics(generate_sequences=1.5),
                extra_fields={"reward_extra_info": {"acc": 1.0}},
            )
        )
    row = {"data_source": "s", "reward_model": {"ground_truth": "4"}}
    life = Session(uid, session, stop_reason="stop", worker="agent_loop_worker_0", max_global_steps=6)
    return build_rows(
        outputs, row=row, session=life, global_steps=7, with_log_probs=True, with_scores=True, invalid=invalid
    )


def test_a_record_says_everything(tokenizer: Any) -> None:
    rows = stored(tokenizer, "e0r3a0", 1, ["4é", "four"])
    data = rows.fields
    like = [torch.tensor([0.5, float("nan"), -float("inf")]), torch.tensor([1e-9, 123456.789, -0.0, 2.0])]
    data["advantages"] = tu.nested_from_list(like)
    stages = [
        StageRecord("gen", 0.0, 1.0, writes=["prompts"]),
        StageRecord("old_log_prob", 1.0, 2.0, version=6, writes=["old_log_probs", "entropy"]),
        StageRecord("adv", 2.0, 3.0, version=6, writes=["advantages", "my_field"]),
    ]
    first, last = trajectory_records(tokenizer, rows.keys, rows.tags, data, 7, "train", stages)
    assert first["key"] == "e0r3a0_1_0" and last["key"] == "e0r3a0_1_1"
    assert (last["uid"], last["session"], last["index"], last["step"], last["partition"]) == (
        "e0r3a0", 1, 1, 7, "train",
    )  # fmt: skip
    assert not first["is_final"] and last["is_final"]
    assert last["prompt_text"] == "2+2" and last["prompt_tokens"] == ["2", "+", "2"]
    assert last["response_text"] == "four" and last["response_tokens"] == list("four")
    assert first["response_text"] == "4é" and first["response_tokens"] == ["4", "\ufffd", "\ufffd"]
    assert first["response_mask"] == [1, 1, 1] and last["rollout_log_probs"] == [-0.25] * 4
    assert first["advantages"] == [0.5, None, None]
    assert torch.equal(torch.tensor(last["advantages"]), like[1]), "nothing of float32 is lost"
    assert last["rm_scores"] == [0, 0, 0, 0.5] and last["reward"] == 0.5 and "invalid" not in last
    assert last["reward_extra_info"] == {"acc": 1.0} and last["ground_truth"] == "4" and last["data_source"] == "s"
    assert (last["stop_reason"], last["num_turns"], last["max_version"]) == ("stop", 2, 6)
    assert last["worker"] == "agent_loop_worker_0" and last["started"] <= last["ended"] <= time.time()
    assert last["timings"]["generate_sequences"] == 1.5 and "num_preempted" not in last["timings"]
    own = {"writer": "agent_loop_worker_0", "time": last["ended"], "version": 6}
    assert last["lineage"] == {
        **dict.fromkeys(ROW_FIELDS, own),
        "advantages": {"writer": "adv", "time": 3.0, "version": 6},
        "my_field": {"writer": "adv", "time": 3.0, "version": 6},
    }
    assert "old_log_probs" not in last
    json.dumps([first, last], allow_nan=False)
    parsed = parse_trajectory(last)
    assert parsed is not None and parsed.reward == 0.5 and parsed.lineage["advantages"].writer == "adv"


def test_an_invalid_reward_is_no_number(tokenizer: Any) -> None:
    rows = stored(tokenizer, "u", 0, ["x"], invalid="no score within 30 s")
    (record,) = trajectory_records(tokenizer, rows.keys, rows.tags, rows.fields, 1, "val")
    assert record["reward"] is None and record["invalid"] == "no score within 30 s"
    assert record["reward_extra_info"] == {}


def test_groups_are_recorded_whole_and_in_order() -> None:
    keys = [f"e0r{row}a0_{session}_0" for session in range(3) for row in (10, 9, 2)]
    chosen = [keys[i] for i in select_groups(keys, 7)]
    assert chosen == [f"e0r{row}a0_{session}_0" for row in (2, 9) for session in range(3)]
    assert len(select_groups(keys, None)) == 9 and select_groups(keys, 0) == [] and select_groups([], 5) == []
    assert len(select_groups(keys, 2)) == 3, "at least one group"
    assert select_groups(keys, 2, at_least_one=False) == []


def test_records_of_steps_to_come_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "trajectories"
    folder.mkdir()
    for name in ("3.jsonl", "4.jsonl", "val_4.jsonl", "val_3.jsonl", "notes.jsonl", "10.jsonl"):
        (folder / name).touch()
    assert {path.name for path in remove_trajectories_after(tmp_path, 3)} == {"4.jsonl", "val_4.jsonl", "10.jsonl"}
    assert {path.name for path in folder.iterdir()} == {"3.jsonl", "val_3.jsonl", "notes.jsonl"}
    assert remove_trajectories_after(tmp_path / "nowhere", 0) == []


@pytest.mark.usefixtures("queue")
def test_the_controller_pays_for_the_fetch_only(tokenizer: Any, tmp_path: Path) -> None:
    """64 rows of 100 + 200 tokens with every response-aligned field there can be."""
    rng = torch.Generator().manual_seed(0)
    keys = [f"e0r{row}a0_{session}_0" for row in range(16) for session in range(4)]
    rows = [
        {
            "prompts": torch.randint(3, 250, (100,), generator=rng),
            "responses": torch.randint(3, 250, (200,), generator=rng),
            "response_mask": torch.ones(200, dtype=torch.int64),
            "num_turns": 2,
            "extra_fields": {"reward_extra_info": {"acc": 1.0}},
            **{name: torch.randn(200, generator=rng) for name in SERIES},
        }
        for _ in keys
    ]
    tags = [{"status": "success", "max_global_steps": 1} for _ in keys]
    tq.kv_batch_put(keys, "train", fields=tu.list_of_dict_to_tensordict(rows), tags=tags)
    writer = DumpWriter(tokenizer)
    seconds = []
    for attempt in range(5):
        start = time.perf_counter()
        data = _fetch(keys, "train")
        path = tmp_path / f"{attempt}.jsonl"
        writer.submit(path, lambda data=data: trajectory_records(tokenizer, keys, tags, data, 1, "train"))
        seconds.append(time.perf_counter() - start)
        writer.flush()
    tq.kv_clear(keys, "train")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 64 and all(len(line[name]) == 200 for line in lines for name in SERIES)
    assert min(seconds) < 0.05, seconds
