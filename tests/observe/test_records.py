"""Reading a run folder: finished, resumed, still going, damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import HOSTILE, write_run, write_running

from rlflow.observe.events import Accounting, Event, Journal
from rlflow.observe.records import RunFolder, RunFolderError, parse_trajectory


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(write_run(tmp_path / "run"))


def test_prompts_are_accounted_for(run: RunFolder) -> None:
    journal = run.journal()
    assert journal.partitions == ["train", "val"]
    assert journal.accounting("train") == Accounting(issued=6, running=0, finished=0, trained=5, dropped=1)
    assert journal.accounting("train", step=2) == Accounting(2, 0, 0, 1, 1)
    assert journal.accounting("val") == Accounting(4, 0, 4, 0, 0)
    dropped = journal.prompt("e0r3a0")
    assert dropped is not None
    assert (dropped.state, dropped.status, dropped.sessions_failed) == ("dropped", "failure", 3)
    assert dropped.reason == "all sessions failed: RewardError"


def test_starts_stages_and_end(run: RunFolder) -> None:
    journal = run.journal()
    assert [start.resumed_from for start in journal.starts] == [None, 1]
    assert journal.starts[0].world_size == 2
    assert [stage.stage for stage in journal.stages] == ["gen", "old_log_prob", "ref", "adv", "update_actor"]
    assert [span.stage for span in journal.spans_of(1)] == [
        *("gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights")
    ]
    assert journal.end is not None and journal.end.data["exit_code"] == 0
    assert journal.last_step == 3
    assert run.best_checkpoint() == {
        "step": 3,
        "metric": "val-core/tiny/sums/acc/mean@1",
        "value": 0.55,
        "path": str(run.path / "global_step_3"),
    }


def test_metrics_of_a_step_are_merged_and_not_finite_is_none(run: RunFolder) -> None:
    metrics = run.metrics()
    assert list(metrics) == [0, 1, 2, 3]
    assert metrics[3]["val-core/tiny/sums/acc/mean@1"] == pytest.approx(0.28)
    assert metrics[3]["training/global_step"] == 3
    assert metrics[3]["critic/vf_explained_var"] is None
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "data": {"a": NaN, "b": 1.5, "c": "text"}}\n')
    assert run.metrics()[4] == {"a": None, "b": 1.5}


def test_trajectories_come_with_their_numbers(run: RunFolder) -> None:
    files = [(file.step, file.partition) for file in run.trajectory_files()]
    assert files == [(0, "val"), (1, "train"), (2, "train"), (3, "val"), (3, "train")]
    rows = run.trajectories(3, "train")
    assert [row.key for row in rows] == [f"e0r{row}a0_{session}_0" for row in (4, 5) for session in range(3)]
    invalid = next(row for row in rows if row.key == "e0r4a0_1_0")
    assert invalid.reward is None and "reward.timeout_s" in (invalid.invalid or "")
    assert invalid.series["advantages"][0] is None, "what is not finite comes as null"
    assert invalid.lineage["advantages"].writer == "adv_worker_0"
    assert invalid.lineage["advantages"].version == 2
    hostile = next(row for row in rows if row.key == "e0r5a0_2_0")
    assert hostile.response_text == " ".join(HOSTILE), "a lone surrogate and line separators survive"
    validation = run.trajectories(0, "val")[0]
    assert "advantages" not in validation.series and validation.advantage is None
    assert run.trajectories(99, "train") == []


def test_advantage_is_the_mean_over_tokens_that_train() -> None:
    row = parse_trajectory({"key": "a_0_0", "response_mask": [1, 0, 1, 1], "advantages": [2.0, 9.0, None, 1.0]})
    assert row is not None
    assert row.uid == "a" and row.advantage == 1.5
    assert parse_trajectory({"uid": "a"}) is None


def test_a_run_that_still_goes(tmp_path: Path) -> None:
    journal = RunFolder(write_running(tmp_path / "run")).journal()
    assert journal.damaged == 0, "a last half line is no damage"
    assert journal.end is None
    assert journal.accounting("train") == Accounting(issued=4, running=1, finished=1, trained=2, dropped=0)


def test_damaged_lines_are_counted_and_passed_over(run: RunFolder) -> None:
    path = run.path / "events.jsonl"
    text = path.read_text()
    path.write_text('{"event": "issued", "ti\n[1, 2]\n\n' + text)
    journal = run.journal()
    assert journal.damaged == 2
    assert journal.accounting("train").issued == 6


def test_a_prompt_issued_again_starts_its_life_over() -> None:
    issued = {"partition": "train", "uids": ["a"], "sessions": 2}
    events = [
        Event("issued", 1.0, 1, issued),
        Event("finished", 2.0, 1, {"partition": "train", "uid": "a", "status": "finished"}),
        Event("issued", 5.0, 2, issued),
        Event("no_such_event", 6.0, 2, {}),
    ]
    journal = Journal(events)
    life = journal.prompt("a")
    assert life is not None
    assert (life.state, life.issued, life.times_issued) == ("running", 5.0, 2)
    assert journal.accounting("train") == Accounting(1, 1, 0, 0, 0)


@given(st.lists(st.tuples(st.sampled_from(["issued", "finished", "trained", "dropped"]), st.integers(0, 4))))
def test_states_always_add_up(steps: list[tuple[str, int]]) -> None:
    events = []
    for time, (name, number) in enumerate(steps):
        uid = f"e0r{number}a0"
        data = {"partition": "train", "uid": uid} if name == "finished" else {"partition": "train", "uids": [uid]}
        events.append(Event(name, float(time), 1, data))
    counts = Journal(events).accounting("train")
    assert counts.issued == counts.running + counts.finished + counts.trained + counts.dropped
    assert counts.issued == len({number for name, number in steps if name == "issued"})


def test_what_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is no folder; give the run's trainer.default_local_dir"):
        RunFolder(tmp_path / "nowhere")
    write_run(tmp_path / "project" / "run")
    with pytest.raises(RunFolderError, match=r"has no events.jsonl.*did you mean .*project/run\?"):
        RunFolder(tmp_path)


def test_a_newer_record_with_unknown_fields_is_read(run: RunFolder) -> None:
    line = {"key": "x_0_0", "step": 9, "shade": "blue", "worker": None, "lineage": {"a": "no object"}}
    (run.path / "trajectories" / "9.jsonl").write_text(json.dumps(line) + "\n" + '{"key": "x_1_')
    [row] = run.trajectories(9, "train")
    assert (row.key, row.worker, row.lineage) == ("x_0_0", None, {})
