"""Fan-out to trackers and what happens when one fails; live table and the event feed."""

from __future__ import annotations

import io
import json
import logging
import socket
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from rlflow.observe.feed import EventFeed
from rlflow.observe.live import LiveTable
from rlflow.observe.tracking import Tracking, ValidationGenerationsLogger, mlflow
from rlflow.observe.tracking.backend import RunInfo
from rlflow.observe.tracking.values import flatten
from rlflow.utils.errors import ConfigError
from rlflow.utils.metric import as_number

pytestmark = pytest.mark.alone


def test_a_resumed_run_appends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_FILE_LOGGER_ROOT", str(tmp_path))
    for step in (1, 2):
        tracking = Tracking("p", "e", ["file"])
        tracking.log({"a": step, "b": float("nan"), "c": float("-inf")}, step=step)
        tracking.finish()
        tracking.finish()
    lines = [json.loads(line) for line in (tmp_path / "p" / "e.jsonl").read_text().splitlines()]
    assert lines == [{"step": step, "data": {"a": step, "b": None, "c": None}} for step in (1, 2)]


def test_an_unknown_tracker_is_named_with_what_was_meant() -> None:
    with pytest.raises(ConfigError, match="names wanb, which is no tracker.*\n.*did you mean wandb"):
        Tracking("p", "e", ["console", "wanb"])
    with pytest.raises(ConfigError, match="vemlp_wandb, which is not in this version"):
        Tracking("p", "e", "vemlp_wandb")


def test_numbers_of_all_kinds() -> None:
    import numpy as np
    import torch

    given = [1, 2.5, True, np.float32(0.5), np.array([3]), torch.tensor(4.0), torch.tensor([[5]])]
    assert [as_number(value) for value in given] == [1, 2.5, 1, 0.5, 3, 4.0, 5]
    assert {type(as_number(value)) for value in given} == {int, float}
    for value in ("1", None, [1], {"a": 1}, np.zeros(2), torch.zeros(2), np.zeros(0), object()):
        assert as_number(value) is None, value
    assert dict(flatten({"a": {"b": [1, {"c": None}]}})) == {"a/b/list_len": 2, "a/b/0": 1, "a/b/1/c": None}


def test_one_backend_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_FILE_LOGGER_ROOT", str(tmp_path))
    tracking = Tracking("p", "e", ["console", "file"])
    tracking.log({"a": 1}, step=1, backend="console")
    tracking.log({"a": 2}, step=2, backend=["file"])
    tracking.finish()
    assert (tmp_path / "p" / "e.jsonl").read_text() == '{"step": 2, "data": {"a": 2}}\n'


def test_a_full_disk_is_said_once_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RLFLOW_FILE_LOGGER_PATH", "/dev/full")
    caplog.set_level(logging.INFO, "rlflow")
    tracking = Tracking("p", "e", ["file"])
    for step in range(3):
        tracking.log({"a": step}, step=step)
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and said[0].startswith("tracker file failed (OSError: [Errno 28]"), said
    tracking.finish()
    assert caplog.records[-1].message.startswith("tracker file: 4 of 4 calls were lost")


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p").write_text("a file where the folder should be")
    monkeypatch.setenv("RLFLOW_FILE_LOGGER_ROOT", str(tmp_path))
    with pytest.raises(ConfigError, match="RLFLOW_FILE_LOGGER_ROOT"):
        Tracking("p", "e", ["file"])


def test_a_server_that_refuses_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:pass-word@127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(mlflow, "PAUSE_S", 0.01)
    caplog.set_level(logging.INFO, "rlflow")
    tracking = Tracking("p", "e", ["mlflow"])
    tracking.log({"a": 1}, step=1)
    tracking.finish()
    said = [record.message for record in caplog.records if "tracker mlflow" in record.message]
    assert len(said) == 2
    assert said[0].startswith("tracker mlflow did not start (MlflowException")
    assert said[1].startswith("tracker mlflow: 2 of 2 calls were lost")
    assert "pass-word" not in caplog.text


def test_a_server_that_never_answers_delays_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        caplog.set_level(logging.INFO, "rlflow")
        tracking = Tracking("p", "e", ["mlflow"])
        start = time.perf_counter()
        for step in range(2500):
            tracking.log({"a": step}, step=step)
        assert time.perf_counter() - start < 2, "2500 calls of a tracker that hangs"
        start = time.perf_counter()
        tracking.finish(timeout_s=0.2)
        assert time.perf_counter() - start < 2
    assert "does not keep up" in caplog.text and "is still sending; it is left behind" in caplog.text


def test_an_id_is_remembered_for_a_resumed_run_only(tmp_path: Path) -> None:
    config = {"trainer": {"default_local_dir": str(tmp_path / "run")}}
    RunInfo.of("p", "e", config).remember("wandb", "id1")
    RunInfo.of("p", "e", config).remember("mlflow", "id2")
    assert RunInfo.of("p", "e", config).remembered("wandb") is None
    resumed = RunInfo.of("p", "e", config, resumed_from=3)
    assert (resumed.remembered("wandb"), resumed.remembered("mlflow"), resumed.remembered("x")) == ("id1", "id2", None)


def test_samples_by_the_name_of_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlflow.utils.tracking import Tracking as OldPath
    from rlflow.utils.tracking import ValidationGenerationsLogger as OldLogger

    assert OldPath is Tracking and OldLogger is ValidationGenerationsLogger
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tb"))
    tracking = Tracking("p", "e", ["tensorboard"])
    table = ValidationGenerationsLogger("p", "e")
    table.log(["tensorboard"], [("a", "b", 1.0)], 3)
    assert not table._own, "the open one is used"
    tracking.finish()
    events = b"".join(path.read_bytes() for path in (tmp_path / "tb").iterdir())
    assert b"val/generations" in events


def test_one_line_a_step_and_the_validation_headline() -> None:
    out = io.StringIO()
    table = LiveTable(Console(file=out, width=200))
    table.show({"type": "progress", "text": "x", "done": 1, "total": 2})
    table.show({"type": "step", "step": 0, "data": {"val-core/s/acc/mean@1": 0.25}})
    for step in (1, 2):
        table.show({"type": "step", "step": step, "data": {"training/global_step": step, "critic/score/mean": 0.5}})
    table.show({"type": "notice", "text": "n"})
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("validation at step 0: val-core/s/acc/mean@1 0.25")
    assert lines[1].split()[:2] == ["step", "reward"]
    assert lines[2].split()[:2] == ["1", "0.500"] and lines[3].split()[0] == "2"
    assert lines[4] == "n"


def test_a_reader_is_woken_by_an_event_and_by_the_end() -> None:
    feed = EventFeed()
    assert feed.after(0, timeout_s=0) == (0, [])
    timer = threading.Timer(0.05, feed.publish, [{"n": 1}])
    timer.start()
    assert feed.after(0, timeout_s=30) == (1, [{"n": 1}])
    threading.Timer(0.05, feed.close).start()
    assert feed.after(1, timeout_s=30) == (1, [])
