"""Dumps: complete files, equal columns, failures that are not lost; and the metrics of the rows' extras."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow.trainer.ppo.dumps import DumpWriter, reward_extras, with_extras
from rlflow.trainer.ppo.row_metrics import compute_row_metrics
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import RlflowError


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def test_rows_are_sorted_and_odd_values_are_json(tmp_path: Path) -> None:
    writer = DumpWriter(None)
    rows = [
        {"uid": "e0r1a0_10_0", "score": float("nan"), "array": np.arange(2), 3: "key"},
        {"uid": "e0r1a0_2_0", "output": "lone \udc80 surrogate \u2028 line", "score": np.float32(0.5)},
        {"uid": "e0r1a0_2_1", "object": Path("x"), "set": (1, float("inf"))},
    ]
    writer.write(str(tmp_path / "dump"), 7, rows)
    writer.flush()
    first, second, third = lines(tmp_path / "dump" / "7.jsonl")
    assert first["output"] == "lone \udc80 surrogate \u2028 line" and first["score"] == 0.5
    assert second["uid"] == "e0r1a0_2_1" and second["object"] == "x" and second["set"] == [1, None]
    assert third == {"uid": "e0r1a0_10_0", "score": None, "array": [0, 1], "3": "key"}
    assert [path.name for path in (tmp_path / "dump").iterdir()] == ["7.jsonl"], "no scratch file is left"


def test_rows_are_made_in_the_writer_thread(tmp_path: Path) -> None:
    writer, threads = DumpWriter(None), []

    def rows() -> list[dict[str, Any]]:
        threads.append(threading.current_thread().name)
        return [{"key": "u_0_0"}]

    writer.submit(tmp_path / "1.jsonl", rows)
    writer.flush()
    assert threads[0].startswith("dumps") and lines(tmp_path / "1.jsonl") == [{"key": "u_0_0"}]


def test_a_failed_write_is_raised_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    writer = DumpWriter(None)
    writer.write(str(tmp_path / "file" / "below"), 1, [])
    with pytest.raises(RlflowError, match="Check the disk of the dump folder"):
        writer.flush()
    writer.flush()
    writer.write(str(tmp_path / "good"), 2, [])
    writer.flush()
    assert lines(tmp_path / "good" / "2.jsonl") == []


def test_all_rows_have_the_same_columns_and_their_own_win() -> None:
    rows = [{"uid": "a", "score": 1.0}, {"uid": "b", "score": None}]
    extras = [{"score": 9, "acc": True}, {"note": "x"}]
    assert with_extras(rows, extras) == [
        {"score": 1.0, "acc": True, "note": None, "uid": "a"},
        {"score": None, "acc": None, "note": "x", "uid": "b"},
    ]


def test_metrics_of_what_rows_carry() -> None:
    keys = ["u_0_0", "u_0_1", "u_1_0", "v_0_0"]
    infos = [{"acc": 0}, {"acc": 1, "score": 3, "len": 2.0}, {"acc": 0, "note": "x", "bad": float("nan")}, {"acc": 0}]
    times = [(9.0, 9.0), (1.0, 0.0), (2.0, 3.0), (4.0, 0.5)]
    rows = [
        {
            "extra_fields": {"reward_extra_info": info},
            "metrics": {"generate_sequences": a, "tool_calls": b, "compute_score": 0.0, "num_preempted": -1},
        }
        for info, (a, b) in zip(infos, times, strict=True)
    ]
    tags: list[dict[str, Any]] = [{"prompt_len": 5, "response_len": n} for n in range(4)]
    tags[3]["invalid"] = "no score"
    data = tu.list_of_dict_to_tensordict(rows)
    metrics = compute_row_metrics(keys, tags, data)
    assert metrics["reward_extra/acc/mean"] == 0.5, "the last output of each session with a valid reward"
    assert metrics["reward_extra/len/mean"] == 2.0
    assert {name for name in metrics if name.startswith("reward_extra/")} == {
        "reward_extra/acc/mean",
        "reward_extra/len/mean",
    }
    assert metrics["agent_loop/generate_sequences/max"] == 4.0 and metrics["agent_loop/tool_calls/min"] == 0.0
    assert metrics["agent_loop/generate_sequences/mean"] == pytest.approx(7 / 3)
    assert metrics["agent_loop/slowest/tool_calls"] == 3.0 and metrics["agent_loop/slowest/response_length"] == 2
    assert not any("num_preempted" in name for name in metrics)
    assert reward_extras(data, tags)[3] == {}
    assert compute_row_metrics(["u_0_0"], tags[:1], tu.list_of_dict_to_tensordict([{"x": 1}])) == {}


def test_tool_calls_are_counted_where_the_agent_loop_says_how_many() -> None:
    keys = ["u_0_0", "u_0_1", "u_1_0", "v_0_0"]
    counts = [9, 1, 4, "unknown"]
    data = tu.list_of_dict_to_tensordict([{"extra_fields": {"tool_call_counts": count}} for count in counts])
    tags: list[dict[str, Any]] = [{"prompt_len": 5, "response_len": 2} for _ in keys]
    metrics = compute_row_metrics(keys, tags, data)
    assert metrics == {"tool_call_counts/mean": 2.5, "tool_call_counts/max": 4.0, "tool_call_counts/min": 1.0}
