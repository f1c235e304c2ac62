"""The life of one key, as data and as text."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from runs import HOSTILE, START, write_run, write_running

from rlflow.observe.records import RunFolder, RunFolderError
from rlflow.observe.trace import Trace, trace_key, trace_to_json
from rlflow.observe.trace_text import render_trace
from rlflow.observe.visible import visible


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(write_run(tmp_path / "run"))


def text_of(trace: Trace, width: int, **options: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False, emoji=False, force_terminal=False)
    render_trace(trace, console, **options)
    return out.getvalue()


def test_states_of_a_trained_trajectory(run: RunFolder) -> None:
    trace = trace_key(run, "e0r4a0_0_0")
    names = [state.name for state in trace.states]
    assert names == [
        *(
            "issued",
            "session",
            "finished",
            "sampled",
            "old_log_prob",
            "ref",
            "adv",
            "update_actor",
            "trained",
            "cleared",
        )
    ]
    times = [state.start for state in trace.states]
    assert times == sorted(times) and times[0] > START
    assert trace.states[1].end is not None and "on agent_loop_worker_0" in trace.states[1].note
    assert trace.states[-2].note == "into weights 3"


def test_fields_name_their_writer_and_their_next_reader(run: RunFolder) -> None:
    fields = {item.name: item for item in trace_key(run, "e0r4a0_0_0").fields}
    assert fields["responses"].writer == "agent_loop_worker_0"
    assert fields["responses"].version == 2
    assert [read.stage for read in fields["responses"].readers] == ["old_log_prob", "ref", "update_actor"]
    assert fields["old_log_probs"].next_reader == "update_actor"
    assert fields["returns"].next_reader is None
    reads = fields["rm_scores"].readers
    assert [read.stage for read in reads] == ["adv"] and reads[0].time is not None and not reads[0].optional


def test_readers_come_from_the_declarations_while_the_journal_has_no_stage(run: RunFolder) -> None:
    path = run.path / "events.jsonl"
    lines = [line for line in path.read_text().splitlines() if '"event": "stage"' not in line]
    path.write_text("\n".join(lines) + "\n")
    fields = {item.name: item for item in trace_key(run, "e0r4a0_0_0").fields}
    assert [(read.stage, read.time, read.optional) for read in fields["ref_log_prob"].readers] == [
        ("update_actor", None, True)
    ]


def test_a_uid_stands_for_its_group(run: RunFolder) -> None:
    trace = trace_key(run, "e0r4a0")
    assert trace.trajectory is None
    assert [row.key for row in trace.group] == ["e0r4a0_0_0", "e0r4a0_1_0", "e0r4a0_2_0"]
    assert "session" not in [state.name for state in trace.states]


def test_a_validation_key(run: RunFolder) -> None:
    trace = trace_key(run, "v3r1a0_0_0")
    assert trace.trajectory is not None and trace.trajectory.partition == "val"
    assert [state.name for state in trace.states] == ["issued", "session", "finished"]


def test_a_running_key_has_its_lines_of_the_journal(tmp_path: Path) -> None:
    run = RunFolder(write_running(tmp_path / "run"))
    running, over = trace_key(run, "e0r3a0_2_0"), trace_key(run, "e0r2a0_0_0")
    assert [state.name for state in running.states] == ["issued"]
    assert "still running" in (running.why or "")
    assert [state.name for state in over.states] == ["issued", "finished"]
    assert "cleared" in [state.name for state in trace_key(run, "e0r0a0_0_0").states], "step 2 has begun"
    assert "still running" in text_of(running, 80)


def test_a_dropped_prompt(run: RunFolder) -> None:
    trace = trace_key(run, "e0r3a0")
    assert [state.name for state in trace.states] == ["issued", "finished", "dropped"]
    assert trace.states[-1].note == "all sessions failed: RewardError"
    assert "a dropped prompt leaves no token-level record" in text_of(trace, 80)


def test_a_record_that_was_not_kept(run: RunFolder) -> None:
    (run.path / "trajectories" / "3.jsonl").unlink()
    assert "trainer.trace.trajectories_per_step" in (trace_key(run, "e0r4a0_0_0").why or "")


def test_a_record_without_a_line_in_the_journal(run: RunFolder) -> None:
    (run.path / "events.jsonl").write_text("")
    trace = trace_key(run, "e0r2a0_1_0")
    assert trace.prompt is None and trace.trajectory is not None and trace.trajectory.step == 2


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("e0r9a0_1_0", r"knows no key or uid 'e0r9a0_1_0'; did you mean e0r\da0_1_0"),
        ("e0r40", r"did you mean .*e0r4a0"),
        ("???", r"a key is \{uid\}_\{session\}_\{index\}, for instance e0r0a0_0_0"),
        ("e0r4a0_7_0", r"no trajectory e0r4a0_7_0; its group has e0r4a0_0_0, e0r4a0_1_0, e0r4a0_2_0"),
        ("e0r3a0_3_0", r"e0r3a0 has 3 sessions, numbered from 0; try e0r3a0_0_0"),
    ],
)
def test_unknown_keys_get_advice(run: RunFolder, key: str, message: str) -> None:
    with pytest.raises(RunFolderError, match=message):
        trace_key(run, key)


def test_json_has_everything_and_survives_hostile_text(run: RunFolder) -> None:
    trace = trace_key(run, "e0r5a0_2_0")
    text = json.dumps(trace_to_json(trace))
    assert text.isascii()
    back = json.loads(text)
    assert back["trajectory"]["response_text"] == " ".join(HOSTILE)
    assert back["trajectory"]["reward_extra_info"]["__proto__"] == HOSTILE[1]
    assert len(back["trajectory"]["old_log_probs"]) == len(back["trajectory"]["response_ids"])
    assert back["prompt"]["state"] == "trained" and back["fields"][0]["next_reader"] is None
    assert [row["key"] for row in back["group"]] == ["e0r5a0_0_0", "e0r5a0_1_0", "e0r5a0_2_0"]


@pytest.mark.parametrize("width", [30, 46, 60, 80, 120])
@pytest.mark.parametrize("key", ["e0r5a0_2_0", "e0r4a0", "e0r3a0_0_0", "v0r0a0_0_0"])
def test_the_text_keeps_to_the_width_and_acts_on_no_terminal(run: RunFolder, key: str, width: int) -> None:
    text = text_of(trace_key(run, key), width)
    assert max(len(line) for line in text.splitlines()) <= width
    for char in "\x00\x07\x1b\u202e\u2066\u2028\ud83d":
        assert char not in text
    assert key in text


def test_the_text_says_what_matters(run: RunFolder) -> None:
    text = text_of(trace_key(run, "e0r5a0_2_0"), 120)
    row = run.trajectories(3, "train")[5]
    for expected in (
        f"{row.series['old_log_probs'][0]:.3f}",
        "old_log_prob, ref, update_actor",
        "into weights 3",
        "\\x1b[31m",
    ):
        assert expected in text
    assert "> e0r5a0_2_0" in text and "  e0r5a0_0_0" in text
    assert "tokens\n" not in text_of(trace_key(run, "e0r5a0_2_0"), 120, tokens=False)
    invalid = text_of(trace_key(run, "e0r4a0_1_0"), 80)
    assert "reward invalid" in invalid and "reward.timeout_s=5" in invalid


def test_visible_writes_out_what_acts_and_leaves_the_rest() -> None:
    assert visible("a\u202eb\x00\ud800\x1b[0m") == "a\\u202eb\\x00\\ud800\\x1b[0m"
    assert visible("fünf 五 👩\u200d🚀 \u00a0x") == "fünf 五 👩\u200d🚀 \u00a0x"
    assert visible("a\nb\tc\rd") == "a⏎b\\tc\\x0dd"
    assert visible("a\nb\tc\rd", newlines=True) == "a\nb\tc\\x0dd"
    assert visible("\U000e0041") == "\\U000e0041"
    assert visible(42) == "42"
