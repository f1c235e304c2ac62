"""File tracker, live table and the event feed."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path

import pytest
from rich.console import Console

from rlflow.observe.feed import EventFeed
from rlflow.observe.live import LiveTable
from rlflow.observe.tracking import Tracking
from rlflow.utils.errors import ConfigError


def test_a_resumed_run_appends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_FILE_LOGGER_ROOT", str(tmp_path))
    for step in (1, 2):
        tracking = Tracking("p", "e", ["file"])
        tracking.log({"a": step, "b": float("nan")}, step=step)
        tracking.finish()
        tracking.finish()
    lines = [json.loads(line) for line in (tmp_path / "p" / "e.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "data": {"a": 1, "b": None}}, {"step": 2, "data": {"a": 2, "b": None}}]


def test_an_unknown_tracker_is_named() -> None:
    with pytest.raises(ConfigError, match="nosuch"):
        Tracking("p", "e", ["nosuch"])


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
