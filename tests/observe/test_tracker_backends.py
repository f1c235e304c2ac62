"""Every tracker for real, offline or in a local folder: what is read back is what was logged."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("track_run.py")
REPO = Path(__file__).parents[2]
REMOTE = ["wandb", "tensorboard", "mlflow", "swanlab", "trackio", "clearml"]
PREFIXES = ("WANDB", "MLFLOW", "SWANLAB", "TRACKIO", "CLEARML", "TENSORBOARD", "RLFLOW", "VERL", "NETRC")


def run_trackers(folder: Path, names: list[str], options: dict[str, Any], **env: str) -> str:
    """Run the script in `folder` as a user without any key would; returns its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(PREFIXES)}
    clean |= {"HOME": str(folder), "PYTHONPATH": str(REPO), "TRACKIO_DIR": str(folder / "trackio")}
    clean |= {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "MLFLOW_DISABLE_TELEMETRY": "true", **env}
    command = [sys.executable, str(SCRIPT), ",".join(names), json.dumps(options)]
    done = subprocess.run(
        command, cwd=folder, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of steps 1 and 2, and the same run resumed from step 1 for steps 2 and 3; (folder, output)."""
    folder = tmp_path_factory.mktemp("trackers")
    out = run_trackers(folder, ["file", *REMOTE], {"steps": [1, 2]})
    out += run_trackers(folder, ["file", *REMOTE], {"steps": [2, 3], "resumed_from": 1, "exit_code": 1})
    return folder, out


def test_each_says_in_one_line_where_it_records(logged: tuple[Path, str]) -> None:
    _, out = logged
    for name in ("wandb records offline in", "swanlab records offline in", "clearml records offline in"):
        assert out.count(name) == 2, out
    assert "calls were lost" not in out and "did not start" not in out


def test_no_secret_reaches_a_tracker(logged: tuple[Path, str]) -> None:
    folder, out = logged
    assert "canary" not in out
    # clearml also sends the source of the script, where this test's secret is written in plain.
    files = [path for path in folder.rglob("*") if path.is_file() and ".clearml" not in path.parts]
    assert len(files) > 10
    for path in files:
        assert b"canary-secret" not in path.read_bytes(), path
    (config,) = {_clearml_task(path)["configuration"]["config"]["value"] for path in _clearml_sessions(folder)}
    assert "canary" not in config and "n = 3" in config


def test_file_appends(logged: tuple[Path, str]) -> None:
    lines = [json.loads(line) for line in (logged[0] / "proj" / "exp.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2, 3]
    assert lines[0]["data"] == {
        "training/global_step": 1,
        "critic/score/mean": 0.25,
        "val-core/a b/acc/mean@2": None,
        "up": None,
        "flag": 1,
        "numpy": 1.5,
        "text": None,
        "array": None,
    }


def test_wandb(logged: tuple[Path, str]) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    folder, _ = logged
    runs = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(runs) == 2 and runs[0].name == runs[1].name, "the resumed part has the run's id"
    steps: dict[int, dict[str, Any]] = {}
    codes = []
    for path in runs:
        for data in _log_records(path):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                steps[record.history.step.num] = items
            elif record.WhichOneof("record_type") == "exit":
                codes.append(record.exit.exit_code)
    assert set(steps) == {1, 2, 3} and codes == [0, 1]
    assert steps[3]["critic/score/mean"] == 0.75 and steps[1]["flag"] == 1 and steps[1]["numpy"] == 1.5
    assert "text" not in steps[1] and "val-core/a b/acc/mean@2" in steps[1]
    tables = sorted(runs[0].parent.glob("files/media/table/val/*.json"), key=lambda path: path.stat().st_size)
    assert len(tables) == 2
    table = json.loads(tables[-1].read_text())
    assert table["columns"] == ["step", "input_1", "output_1", "score_1", "input_2", "output_2", "score_2"]
    assert [row[0] for row in table["data"]] == [1, 2], "the table grows"
    assert table["data"][0][1:] == ["1+1", "line one\nline two", 1.0, "2+2", "# five", None]


def test_tensorboard(logged: tuple[Path, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(logged[0] / "tensorboard_log" / "proj" / "exp"))
    events.Reload()
    # Step 2 of the interrupted part is replaced by the resumed one's.
    assert [(s.step, s.value) for s in events.Scalars("critic/score/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert events.Scalars("val-core/a b/acc/mean@2")[0].value != events.Scalars("val-core/a b/acc/mean@2")[0].value
    (tag,) = [tag for tag in events.Tags()["tensors"] if "generations" in tag]
    text = events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
    assert "line two" in text and "    # five" in text and "invalid" in text
    assert "text" not in events.Tags()["scalars"]


def test_mlflow(logged: tuple[Path, str]) -> None:
    folder, _ = logged
    with sqlite3.connect(folder / "mlflow.db") as db:
        ((run, status, name),) = db.execute("select run_uuid, status, name from runs").fetchall()
        assert (status, name) == ("FAILED", "exp")
        steps = db.execute("select step, value from metrics where key = 'critic/score/mean' order by step").fetchall()
        assert steps == [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)]
        (nan,) = db.execute("select distinct is_nan from metrics where key = 'val-core/a b/acc/mean_at_2'").fetchall()
        assert nan == (1,)
        params = dict(db.execute("select key, value from params").fetchall())
        assert params["reward/urls/list_len"] == "1" and params["reward/api_key"] == "***"
    (artifact,) = folder.glob(f"mlruns/*/{run}/artifacts/val_step3.json")
    assert json.loads(artifact.read_text())[1] == {"input": "2+2", "output": "# five", "score": None}


def test_swanlab(logged: tuple[Path, str]) -> None:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    folder, _ = logged
    seen = {}
    for path in folder.glob("swanlog/run-*/*.swanlab"):
        for data in _log_records(path):
            record = Record.FromString(data)
            if record.HasField("scalar"):
                seen[record.scalar.key, record.scalar.step] = record.scalar.value.number
    assert seen["critic/score/mean", 3] == 0.75 and seen["numpy", 1] == 1.5 and seen["flag", 2] == 1.0
    assert not any(key in ("up", "text", "val-core/a b/acc/mean@2") for key, _ in seen)
    table = json.loads(next(folder.glob("swanlog/run-*/media/echarts/*.json")).read_text())
    assert table["rowData"][1]["output"] == "# five" and table["rowData"][1]["score"] == "invalid"


def test_trackio(logged: tuple[Path, str]) -> None:
    folder, _ = logged
    code = "import json, trackio.sqlite_storage as s; print(json.dumps(s.SQLiteStorage.get_logs('proj', 'exp')))"
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRACKIO_DIR": str(folder / "trackio"), "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    logs = json.loads(out.splitlines()[-1])
    scores = [(row["step"], row["critic/score/mean"]) for row in logs if "critic/score/mean" in row]
    assert scores == [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)], "one run, continued"
    tables = [row["val/generations"]["_value"] for row in logs if "val/generations" in row]
    assert tables[0][0] == {"step": 1, "input": "1+1", "output": "line one\nline two", "score": 1.0}
    assert len(list((folder / "trackio" / "traces").rglob("*.jsonl"))) == 8


def test_clearml(logged: tuple[Path, str]) -> None:
    folder, _ = logged
    sessions = _clearml_sessions(folder)
    assert len(sessions) == 2
    events = [event for path in sessions for event in _clearml_metrics(path)]
    scalars = {(e["metric"], e["variant"], e["iter"]): e["value"] for e in events if "scalar" in e["type"]}
    assert scalars["critic", "score/mean", 3] == 0.75 and scalars["numpy", "numpy", 1] == 1.5
    assert ("up", "up", 1) not in scalars
    plots = [event for event in events if event["type"] == "plot"]
    assert len(plots) == 4 and "line two" in plots[0]["plot_str"]


def test_the_user_decides_where_tensorboard_and_file_write(tmp_path: Path) -> None:
    run_trackers(
        tmp_path,
        ["file", "tensorboard"],
        {"steps": [1]},
        VERL_FILE_LOGGER_PATH=str(tmp_path / "x" / "log.jsonl"),
        TENSORBOARD_DIR=str(tmp_path / "tb"),
    )
    assert (tmp_path / "x" / "log.jsonl").is_file() and list((tmp_path / "tb").iterdir())


def _log_records(path: Path) -> Iterator[bytes]:
    """Records of the block format of wandb's and swanlab's offline files."""
    data = path.read_bytes()
    position, parts = 7, b""
    while position < len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or last part
            yield parts
            parts = b""


def _clearml_sessions(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(".clearml/cache/offline/*") if path.is_dir())


def _clearml_task(session: Path) -> dict[str, Any]:
    task: dict[str, Any] = json.loads((session / "task.json").read_text())
    return task


def _clearml_metrics(session: Path) -> Iterator[dict[str, Any]]:
    for line in (session / "metrics.jsonl").read_text().splitlines():
        yield from json.loads(line)
