"""What a run leaves in its folder: journal, numbers, configuration; and one writer at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlflow.observe.journal import read_lines
from rlflow.observe.recorder import RunRecorder
from rlflow.utils.errors import ConfigError
from rlflow.utils.import_utils import load_module


@pytest.mark.timeout(200)
def test_every_prompt_and_stage_of_a_run_is_in_its_journal(
    run_trainer: Callable[..., Any], tiny_overrides: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "checkpoints"
    overrides = [
        *tiny_overrides,
        "trainer.val_before_train=true",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        "trainer.plots=true",
        "actor_rollout_ref.actor.use_kl_loss=true",
    ]
    run_trainer(overrides)
    events = list(read_lines(run / "events.jsonl"))
    kinds = [event["event"] for event in events]
    assert kinds[0] == "run_started" and kinds[-1] == "run_ended" and events[-1]["exit_code"] == 0
    assert [e["time"] for e in events] == sorted(e["time"] for e in events)

    train = [e for e in events if e.get("partition") == "train"]
    issued = [uid for e in train if e["event"] == "issued" for uid in e["uids"]]
    finished = [e["uid"] for e in train if e["event"] == "finished"]
    trained = [uid for e in events if e["event"] == "trained" for uid in e["uids"]]
    assert len(issued) == len(set(issued)) == 4
    assert sorted(issued) == sorted(finished) == sorted(trained)
    val = [e for e in events if e.get("partition") == "val"]
    assert sum(len(e["uids"]) for e in val if e["event"] == "issued") == 6
    assert sum(e["event"] == "finished" for e in val) == 6

    stages = [(e["step"], e["stage"]) for e in events if e["event"] == "stage"]
    step = ["gen", "old_log_prob", "ref", "adv", "update_actor"]
    assert [s for n, s in stages if n == 0] == ["testing"]
    assert [s for n, s in stages if n == 1] == [*step, "update_weights"]
    assert [s for n, s in stages if n == 2] == [*step, "save_checkpoint", "update_weights", "testing"]
    versions = {(e["step"], e["stage"]): e["version"] for e in events if e["event"] == "stage"}
    assert versions[2, "old_log_prob"] == 1 and versions[2, "update_weights"] == 2
    assert [e["version"] for e in events if e["event"] == "weights"] == [0, 1, 2]
    # The step counts as saved only after everything it reports was written.
    assert kinds.index("saved") > max(i for i, kind in enumerate(kinds) if kind in ("trained", "validated"))

    assert not any("values" in e.get("reads", []) for e in events if e["event"] == "stage")
    declared = {stage["stage"]: stage for stage in events[0]["stages"]}
    assert "old_log_probs" in declared["old_log_prob"]["writes"] and "ref_log_prob" in declared["ref"]["writes"]
    numbers = list(read_lines(run / "metrics.jsonl"))
    assert [line["step"] for line in numbers] == [0, 1, 2]
    assert numbers[1]["data"]["training/global_step"] == 1
    assert "train_batch_size: 2" in (run / "config.yaml").read_text()
    assert (run / "plots" / "reward.png").stat().st_size > 0
    assert len(list(read_lines(run / "trajectories" / "2.jsonl"))) == 6
    best = json.loads((run / "best_checkpoint.json").read_text())
    assert best["step"] == 2 and best["path"].endswith("global_step_2")
    # docs/metrics.md and docs/run_folder.md explain all of it.
    pages = load_module(str(Path(__file__).resolve().parents[1] / "docs" / "pages.py"))
    assert pages.undocumented_metrics(name for line in numbers for name in line["data"]) == []
    assert pages.undocumented_facts(events) == []

    # The same command again: nothing is left to do, and the record of the finished run stays.
    run_trainer(overrides)
    again = list(read_lines(run / "events.jsonl"))
    assert again[-1]["event"] == "run_ended" and again[-1]["exit_code"] == 0
    assert [e for e in again if e["event"] == "trained"] == [e for e in events if e["event"] == "trained"]
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [0, 1, 2]


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    first = RunRecorder(tmp_path / "run")
    with pytest.raises(ConfigError, match="another run") as refusal:
        RunRecorder(tmp_path / "run")
    assert "process" in str(refusal.value)
    first.end(0, 0)
    RunRecorder(tmp_path / "run").end(0, 0)


def test_going_back_to_a_checkpoint_moves_later_lines_away(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.open(0, "a: 1\n", fresh=True)
    for step in (1, 2, 3):
        recorder.issued(step, "train", [f"e0r{step}a0"], 2, step - 1)
        recorder.trained(step, [f"e0r{step}a0"], 2, step)
        recorder.log(step, {"x": float(step)})
        if step == 2:
            recorder.saved(step, tmp_path / "global_step_2", best=False)
    recorder.end(3, 1, "killed")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "trained", "uids": ["e0r')  # a process that died while it wrote

    recorder = RunRecorder(tmp_path)
    recorder.open(2, "a: 2\n", fresh=True)
    recorder.end(2, 0)
    events = list(read_lines(tmp_path / "events.jsonl"))
    assert [uid for e in events if e["event"] == "trained" for uid in e["uids"]] == ["e0r1a0", "e0r2a0"]
    resumed = next(e for e in events if e["event"] == "resumed")
    assert resumed["from_step"] == 2 and resumed["dropped_lines"] == 4
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]
    moved = [json.loads(line) for line in (tmp_path / "events.rolled_back.jsonl").read_text().splitlines()]
    assert [e["event"] for e in moved] == ["issued", "finished", "trained", "run_ended"]


def test_a_resume_between_commit_and_its_journal_line_keeps_the_step(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.open(0, "", fresh=True)
    recorder.trained(1, ["e0r0a0"], 1, 1)
    recorder.log(1, {"x": 1.0})  # killed here: the checkpoint of step 1 counts, its `saved` line is missing
    recorder.end(1, 1)
    recorder = RunRecorder(tmp_path)
    recorder.open(1, "", fresh=True)
    recorder.end(1, 0)
    assert [e["event"] for e in read_lines(tmp_path / "events.jsonl")].count("trained") == 1
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1]
