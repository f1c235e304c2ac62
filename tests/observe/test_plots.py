"""Plots of whole, short, odd and empty runs."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from rlflow.observe import plots
from rlflow.observe.plots import read_series, running_mean, stage_seconds, validation_panels, write_plots

NUMBERS = {
    "critic/score/mean": 0.5,
    "critic/score/min": 0,
    "critic/score/max": 1.0,
    "critic/rewards/mean": 0.5,
    "response_length/mean": 100,
    "response_length/min": 7,
    "response_length/max": 128,
    "response_length/clip_ratio": 0.25,
    "training/rollout_log_probs_diff/mean": 1e-7,
    "training/rollout_log_probs_diff/max": 1e-5,
    "actor/ppo_kl": -1e-4,
    "actor/entropy": 2.0,
    "timing_s/gen": 2.0,
    "timing_s/update_actor": 1.0,
    "timing_s/update_weights": 0.5,
    "timing_s/step": 4.0,
    "timing_s/testing": 1.0,
    "val-core/openai/gsm8k/acc/mean@2": 0.5,
    "val-core/openai/gsm8k/acc/best@2/mean": 0.75,
    "val-core/openai/gsm8k/acc/best@2/std": 0.1,
    "val-core/math/reward/mean@2": 0.5,
}
ALL = ["reward.png", "length.png", "kl.png", "timing.png", "validation.png"]


def write(folder: Path, lines: list[Any]) -> Path:
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return folder


def run(folder: Path, steps: int) -> Path:
    return write(folder, [{"step": step, "data": NUMBERS} for step in range(1, steps + 1)])


@pytest.mark.parametrize("steps", [1, 8, 700])
def test_a_run_has_all_pages(tmp_path: Path, steps: int) -> None:
    files = write_plots(run(tmp_path, steps))
    assert [path.name for path in files] == ALL
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == sorted(ALL)
    for path in files:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 5_000


def test_a_run_that_ended_early_has_the_pages_it_can_have(tmp_path: Path) -> None:
    lines: list[Any] = [{"step": 0, "data": {"val-core/s/reward/mean@1": 0.5, "timing_s/gen": None}}]
    write(tmp_path, [*lines, {"step": 1}, {"step": "x", "data": {}}, {"data": {"critic/score/mean": 1}}, 3])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "data": {"critic/sc')
    assert [path.name for path in write_plots(tmp_path)] == ["validation.png"]


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert write_plots(tmp_path) == [] and write_plots(tmp_path / "nowhere") == []
    assert write_plots(write(tmp_path, [])) == [] and not (tmp_path / "plots").exists()


def test_without_matplotlib_one_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    caplog.set_level(logging.INFO, "rlflow")
    assert write_plots(run(tmp_path, 1)) == []
    assert caplog.messages == ["no plots: matplotlib is not installed (pip install 'rlflow[plots]')"]


def test_a_page_that_fails_does_not_take_the_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plots" / ".kl.png.tmp").mkdir(parents=True)
    assert [path.name for path in write_plots(run(tmp_path, 2))] == [name for name in ALL if name != "kl.png"]
    assert "kl.png could not be drawn" in caplog.text


def test_a_step_logged_twice_counts_once_and_steps_are_in_order(tmp_path: Path) -> None:
    lines = [(2, 0.2), (1, 0.1), (2, 0.9), (3, float("nan"))]
    write(tmp_path, [{"step": step, "data": {"a": value}} for step, value in lines])
    assert read_series(tmp_path / "metrics.jsonl") == {"a": {1: 0.1, 2: 0.9}}


def test_seconds_add_up_to_the_step(tmp_path: Path) -> None:
    series = read_series(run(tmp_path, 2) / "metrics.jsonl")
    steps, stages = stage_seconds(series)
    assert steps == [1, 2]
    assert list(stages) == ["gen", "update_actor", "update_weights", "other", "testing"]
    assert stages["other"] == [0.5, 0.5] and stages["testing"] == [1.0, 1.0]


def test_validation_has_a_panel_a_source() -> None:
    panels = validation_panels({name: {1: value} for name, value in NUMBERS.items()})
    assert [(p.title, [c.label for c in p.curves]) for p in panels] == [
        ("Validation: math", ["reward mean@2"]),
        ("Validation: openai/gsm8k", ["acc best@2", "acc mean@2"]),
    ]


def test_the_running_mean_is_centred() -> None:
    assert running_mean([0, 0, 3, 0, 0], 3) == [0, 1, 1, 1, 0]
    assert running_mean([1, 2], 5) == [1.5, 1.5]


def test_the_pages_need_no_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "TkAgg")
    monkeypatch.delenv("DISPLAY", raising=False)
    assert len(write_plots(run(tmp_path, 2))) == len(ALL)
    assert plots.PAGES
