"""The viewer's folder: what is in it, how it is replaced, and that no text of a model can become markup or script."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import HOSTILE, write_run, write_running

from rlflow.observe.records import RunFolder
from rlflow.observe.viewer import ViewError, write_view
from rlflow.observe.viewer.write import SCRIPTS, duration_text, number_text

ASSETS = Path(__file__).parents[2] / "rlflow" / "observe" / "viewer" / "assets"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(write_run(tmp_path / "run"))


def data_of(out: Path, name: str) -> Any:
    """What a data file hands to the viewer."""
    text = (out / "data" / f"{name}.js").read_text()
    match = re.fullmatch(r'RLFLOW\.add\("([\w-]+)",JSON\.parse\((".*")\)\);\n', text, re.S)
    assert match and match[1] == name
    return json.loads(json.loads(match[2]))


def test_the_folder_is_whole_and_self_contained(run: RunFolder, tmp_path: Path) -> None:
    report = write_view(run, tmp_path / "out")
    assert report.index.is_file() and report.trajectories == 19
    assert report.files == sum(path.is_file() for path in (tmp_path / "out").rglob("*"))
    page = report.index.read_text()
    for reference in re.findall(r'(?:src|href)="([^"#][^"]*)"', page):
        assert (tmp_path / "out" / reference).is_file(), reference
    for path in (tmp_path / "out").rglob("*"):
        if path.suffix in (".js", ".css", ".html"):
            urls = set(re.findall(r"https?://[^\s\"')]+", path.read_text()))
            assert urls <= {"http://www.w3.org/2000/svg"}, "the name of a format, never fetched"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_overview_has_facts_headlines_and_prompts(run: RunFolder, tmp_path: Path) -> None:
    changes = {"actor_rollout_ref.rollout.n": 1, "trainer.logger": ["console", "wandb"]}
    page = write_view(run, tmp_path / "out", changes=changes).index.read_text()
    words = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    for expected in (
        "The run is complete.",
        "Steps 3 of 3",
        "Resumed after step 1",
        "Best checkpoint step 3: val-core/tiny/sums/acc/mean@1 = 0.55",
        "train 6 0 0 5 1",
        "val 4 0 4 0 0",
        "2 keys differ from the defaults",
        "actor_rollout_ref.rollout.n 3 1",
        "trainer.logger [console] [console, wandb]",
        "models/&lt;tiny&gt;",
        "what: reward_worker_0; text: child process 4711 died: &lt;killed by signal 9&gt;",
        "uids: e0r3a0; reason: all sessions failed: RewardError",
    ):
        assert expected in words, expected
    assert 'title="actor/grad_norm: gradient norm before clipping' in page


def test_running_killed_and_unknown_are_told_apart(tmp_path: Path) -> None:
    folder = write_running(tmp_path / "run")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=30)
    for owner, expected in (
        (f"process {os.getpid()} on {os.uname().nodename}", "The run was still going"),
        (f"process {dead.pid} on {os.uname().nodename}", "The run was killed"),
        (f"process {os.getpid()} on another-machine", "was still going when this was made, or it was killed"),
    ):
        (folder / "run.lock").write_text(f"{owner}\n")
        assert expected in write_view(RunFolder(folder), tmp_path / "out").index.read_text()


def test_a_number_taken_by_a_later_process_is_no_sign_of_life(tmp_path: Path) -> None:
    folder = write_running(tmp_path / "run")
    (folder / "run.lock").write_text(f"process {os.getpid()} on {os.uname().nodename}\n")
    os.utime(folder / "run.lock", (1.0, 1.0))
    assert RunFolder(folder).writer_lives() is False


def test_a_run_without_numbers_config_or_trajectories_has_pages_too(tmp_path: Path) -> None:
    folder = write_running(tmp_path / "run")
    shutil.rmtree(folder / "trajectories")
    (folder / "metrics.jsonl").unlink()
    page = write_view(RunFolder(folder), tmp_path / "out").index.read_text()
    assert "still going when this was made" in page and "has no config.yaml" in page
    (folder / "events.jsonl").write_text("")
    assert "No prompt was issued yet" in write_view(RunFolder(folder), tmp_path / "out").index.read_text()


def test_a_step_file_has_the_lives_of_its_trajectories(run: RunFolder, tmp_path: Path) -> None:
    write_view(run, tmp_path / "out")
    step = data_of(tmp_path / "out", "train-3")
    assert len(step["prompts"]) == 1, "equal prompts are stored once"
    row = next(row for row in step["trajectories"] if row["key"] == "e0r5a0_1_0")
    assert [state[0] for state in row["states"]][-2:] == ["trained", "cleared"]
    field = next(field for field in row["fields"] if field[0] == "old_log_probs")
    assert field[1] == "old_log_prob_worker_0" and [read[0] for read in field[4]] == ["update_actor"]
    assert len(row["series"]["advantages"]) == len(row["response_ids"])
    assert step["lives"]["e0r5a0"]["state"] == "trained"
    val = data_of(tmp_path / "out", "val-3")
    assert [span["stage"] for span in val["stages"]] == ["testing"]
    index = data_of(tmp_path / "out", "index")
    keys = [line[index["columns"].index("key")] for line in index["rows"]]
    assert keys[:2] == ["v0r0a0_0_0", "v0r1a0_0_0"] and len(keys) == 19
    assert data_of(tmp_path / "out", "text-0")[-1][0] == keys[-1]


def test_the_runs_file_has_curves_stages_and_prompts(run: RunFolder, tmp_path: Path) -> None:
    write_view(run, tmp_path / "out")
    payload = data_of(tmp_path / "out", "run")
    assert payload["steps"] == [0, 1, 2, 3]
    assert payload["metrics"]["critic/score/mean"][0] is None
    assert "critic/vf_explained_var" not in payload["metrics"], "never finite, so no curve"
    titles = [chart["title"] for chart in payload["charts"]]
    assert titles == [
        *("Reward", "Validation", "Response length", "KL", "Entropy", "Gradient norm", "Trainer against rollout")
    ]
    assert payload["help"]["critic/score/mean"].startswith("score of a trajectory")
    assert payload["help"].keys() <= payload["metrics"].keys()
    assert [2, "train", 2, 0, 0, 1, 1] in payload["accounting"]
    assert payload["stages"][0][1] == "testing" and len(payload["stages"]) == 3 * 6 + 2
    assert payload["files"][-1] == ["train-3", 3, "train"]


def test_hostile_text_is_ascii_in_data_and_escaped_in_the_page(run: RunFolder, tmp_path: Path) -> None:
    with (run.path / "events.jsonl").open("a", errors="backslashreplace") as file:
        for text in HOSTILE:
            line = {"event": "fault", "time": 1.0, "step": 3, "what": text, "text": text}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    (run.path / "config.yaml").write_text("a:\n  '<script>window.pwned=4</script>': '\"><svg onload=window.pwned=5>'\n")
    write_view(run, tmp_path / "out", changes={})
    for path in (tmp_path / "out" / "data").iterdir():
        raw = path.read_bytes()
        assert raw.isascii() and b"\x00" not in raw
    step = data_of(tmp_path / "out", "train-3")
    row = next(row for row in step["trajectories"] if row["key"] == "e0r5a0_2_0")
    assert row["response_text"] == " ".join(HOSTILE) and row["reward_extra_info"]["__proto__"] == HOSTILE[1]
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert len(re.findall(r"<script", page)) == len(SCRIPTS), "only our own"
    assert "<img" not in page and "<svg" not in page
    for char in "\x00\x1b\u202e\u2028":
        assert char not in page
    assert "&lt;script&gt;window.pwned=4&lt;/script&gt;" in page


def test_scripts_make_no_markup_from_strings() -> None:
    for name in SCRIPTS:
        text = (ASSETS / name).read_text()
        found = re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc", text)
        assert not found, f"{name}: {found}"


def test_pages_of_this_module_are_replaced_and_nothing_else(run: RunFolder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_view(run, out)
    (out / "data" / "train-99.js").write_text("old")
    write_view(run, out)
    assert not (out / "data" / "train-99.js").exists()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    for place, message in ((foreign, "was not made by rlflow view"), (run.path, "is the run folder itself")):
        with pytest.raises(ViewError, match=message):
            write_view(run, place)
    assert (foreign / "thesis.tex").read_text() == "years of work"
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ViewError, match="was not made by rlflow view"):
        write_view(run, file)
    with pytest.raises(ViewError, match=r"cannot be written: .*; try another --out"):
        write_view(run, file / "below")


def test_a_failure_leaves_the_old_pages(run: RunFolder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_view(run, out)
    before = (out / "index.html").read_text()

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_view(run, out, on_file=stop)
    assert (out / "index.html").read_text() == before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


def test_numbers_as_people_read_them() -> None:
    assert [number_text(value) for value in (0.0, 1234567.0, 3212, 0.123456, 1e-7)] == [
        *("0", "1\u202f234\u202f567", "3\u202f212", "0.1235", "1e-07")
    ]
    assert [duration_text(value) for value in (1.25, 75, 7300)] == ["1.2 s", "1 min 15 s", "2 h 01 min"]
