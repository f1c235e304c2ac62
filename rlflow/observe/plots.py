"""Curves of a run as PNG files in `{run folder}/plots/`, drawn from its metrics.jsonl.

    reward.png       score of a trajectory: mean, lowest, highest
    length.png       tokens of a response, and how many responses were cut
    kl.png           how far trainer and rollout engine disagree, KL, entropy
    timing.png       where a step's seconds go
    validation.png   headline numbers of the validations

A page is written when the run has a number for it. Nothing here ever fails a run: what cannot be drawn is said.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from rlflow.observe.feed import notice
from rlflow.observe.journal import METRICS, read_lines

logger = logging.getLogger(__name__)

Points = dict[int, float]  # step -> value

# Blue, orange, green, ...: told apart by most eyes, also without colour vision (Okabe & Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
STAGES = (
    *("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"),
    *("update_weights", "save_checkpoint", "testing"),
)
OUTSIDE_THE_STEP = ("testing",)
_HEADLINE = re.compile(r"val-core/(?P<source>.+)/(?P<variable>[^/]+)/(?P<metric>mean@\d+|(?:best|maj)@\d+/mean)")
# Up to so many steps single values are marked; beyond, a running mean is drawn over the raw line.
MARKED = 40
BARS = 60
COLUMNS = 300


@dataclass(frozen=True)
class Curve:
    """A metric to draw; `extremes` are drawn beside it, thin."""

    metric: str
    label: str
    extremes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Panel:
    """One pair of axes. Curves the run has no numbers for are left out, and a panel without any curve too."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    log: bool = False
    share: bool = False  # values lie between 0 and 1


PAGES: dict[str, tuple[Panel, ...]] = {
    "reward": (
        Panel(
            "Score of a trajectory",
            "score",
            (
                Curve("critic/score/mean", "mean of the batch", ("critic/score/max", "critic/score/min")),
                Curve("critic/rewards/mean", "mean after the KL penalty"),
            ),
        ),
    ),
    "length": (
        Panel(
            "Length of a response",
            "tokens",
            (Curve("response_length/mean", "mean of the batch", ("response_length/max", "response_length/min")),),
        ),
        Panel(
            "Responses cut at the limit",
            "share of the batch",
            (Curve("response_length/clip_ratio", "data.max_response_length reached"),),
            share=True,
        ),
    ),
    "kl": (
        Panel(
            "Rollout engine against trainer: difference of log-probs",
            "nats",
            (
                Curve("training/rollout_log_probs_diff/mean", "mean"),
                Curve("training/rollout_log_probs_diff/max", "largest"),
            ),
            log=True,
        ),
        Panel(
            "KL divergence",
            "nats",
            (
                Curve("actor/ppo_kl", "policy before and after the updates of a step"),
                Curve("actor/kl_loss", "to the reference, in the loss"),
                Curve("actor/reward_kl_penalty", "to the reference, in the reward"),
            ),
        ),
        Panel("Entropy of the policy", "nats a token", (Curve("actor/entropy", "mean of the batch"),)),
    ),
}


def write_plots(run_folder: Path) -> list[Path]:
    """Draw what the run folder has numbers for; returns the files. Without matplotlib: one notice, no file."""
    run_folder = Path(run_folder)
    series = read_series(run_folder / METRICS)
    if not series:
        return []
    try:
        import matplotlib
    except ImportError:
        notice("no plots: matplotlib is not installed (pip install 'rlflow[plots]')")
        return []
    written = []
    with matplotlib.rc_context(_style()):
        for name in (*PAGES, "timing", "validation"):
            path = run_folder / "plots" / f"{name}.png"
            try:
                if _draw_page(name, series, path, title=run_folder.name):
                    written.append(path)
            except Exception as error:  # noqa: BLE001 - a picture less, at the very end of a run
                logger.warning("plot %s could not be drawn: %s: %s", path, type(error).__name__, error, exc_info=True)
    return written


def read_series(path: Path) -> dict[str, Points]:
    """Metric -> its finite values by step, in the order of steps; of a step logged twice the later one. {} without a
    file.
    """
    if not path.is_file():
        return {}
    series: dict[str, Points] = {}
    for line in read_lines(path):
        step, data = line.get("step"), line.get("data")
        if isinstance(step, int) and isinstance(data, dict):
            for name, value in data.items():
                if isinstance(value, (int, float)) and math.isfinite(value):
                    series.setdefault(name, {})[step] = float(value)
    return {name: dict(sorted(points.items())) for name, points in series.items()}


def stage_seconds(series: Mapping[str, Points]) -> tuple[list[int], dict[str, list[float]]]:
    """(steps, stage -> seconds in each of them); what a step spends between its stages is `other`."""
    whole = series.get("timing_s/step", {})
    steps = list(whole)
    known = [stage for stage in STAGES if series.get(f"timing_s/{stage}")]
    seconds = {stage: [series[f"timing_s/{stage}"].get(step, 0.0) for step in steps] for stage in known}
    inside = [stage for stage in known if stage not in OUTSIDE_THE_STEP]
    rest = [max(0.0, whole[step] - sum(seconds[stage][i] for stage in inside)) for i, step in enumerate(steps)]
    outside = {stage: seconds.pop(stage) for stage in OUTSIDE_THE_STEP if stage in seconds}
    return steps, {**seconds, "other": rest, **outside}


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the `window` values around each position, fewer at the ends."""
    sums = [0.0, *accumulate(values)]
    half = window // 2
    spans = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in spans]


def validation_panels(series: Mapping[str, Points]) -> list[Panel]:
    """One panel a data source: its headline numbers, without their spread."""
    sources: dict[str, list[Curve]] = {}
    for name in sorted(series):
        match = _HEADLINE.fullmatch(name)
        if match:
            label = f"{match['variable']} {match['metric'].removesuffix('/mean')}"
            sources.setdefault(match["source"], []).append(Curve(name, label))
    return [Panel(f"Validation: {source}", "value", tuple(curves)) for source, curves in sources.items()]


# --- drawing ----------------------------------------------------------------------------------------------------------


def _draw_page(name: str, series: Mapping[str, Points], path: Path, title: str) -> bool:
    """Draw one page into `path`; False when the run has nothing for it."""
    if name == "timing":
        panels: list[Any] = ["timing"] if stage_seconds(series)[0] else []
    else:
        found = validation_panels(series) if name == "validation" else PAGES[name]
        panels = [panel for panel in found if any(series.get(curve.metric) for curve in panel.curves)]
    if not panels:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1 + 3.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        _whole_steps(axis)
        if panel == "timing":
            _draw_timing(axis, series)
        else:
            _draw_panel(axis, panel, series)
        axis.set_xlabel("step")
    figure.suptitle(title, x=0.995, ha="right", fontsize=9, color="#606060")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    figure.savefig(scratch, format="png", dpi=120)
    os.replace(scratch, path)
    return True


def _draw_panel(axis: Any, panel: Panel, series: Mapping[str, Points]) -> None:
    drawn = 0
    first: Points | None = None
    for curve in panel.curves:
        points = series.get(curve.metric)
        # A curve that lies on the one before says nothing (rewards without a KL penalty).
        if not points or points == first:
            continue
        first = first or points
        _draw_curve(axis, curve, points, series, COLOURS[drawn % len(COLOURS)])
        drawn += 1
    axis.set_title(panel.title, loc="left")
    if first is not None and len(first) > MARKED:
        note = f"bold: mean over {_window(list(first))} steps"
        axis.set_title(note, loc="right", fontsize=9, fontweight="normal", color="#606060")
    axis.set_ylabel(panel.unit)
    if panel.log and all(value > 0 for curve in panel.curves for value in series.get(curve.metric, {}).values()):
        axis.set_yscale("log")
    elif panel.share:
        axis.set_ylim(-0.02, 1.02)
    axis.margins(x=0.02)
    axis.legend(loc="best")


def _draw_curve(axis: Any, curve: Curve, points: Points, series: Mapping[str, Points], colour: str) -> None:
    steps, values = list(points), list(points.values())
    label = "highest, lowest"
    for name in curve.extremes:
        edge = series.get(name, {})
        marker = "_" if len(edge) <= MARKED else ""
        axis.plot(list(edge), list(edge.values()), color="#8a8a8a", lw=0.8, marker=marker, ms=5, label=label)
        label = ""
    if len(steps) <= MARKED:
        axis.plot(steps, values, color=colour, marker="o", markersize=4, label=curve.label)
        return
    axis.plot(steps, values, color=colour, alpha=0.35, linewidth=0.8)
    axis.plot(steps, running_mean(values, _window(steps)), color=colour, label=curve.label)


def _window(steps: Sequence[int]) -> int:
    return max(5, len(steps) // 50)


def _draw_timing(axis: Any, series: Mapping[str, Points]) -> None:
    steps, stages = stage_seconds(series)
    # Long runs: columns of several steps, each the mean of its steps.
    width = math.ceil(len(steps) / COLUMNS)
    steps = steps[::width]
    columns = {name: _means(values, width) for name, values in stages.items()}
    columns = {name: values for name, values in columns.items() if any(values)}
    total = sum(sum(values) for values in columns.values()) or 1.0
    bottom = [0.0] * len(steps)
    # Fixed colours: a stage looks the same in every run.
    palette = {stage: _stage_colour(i) for i, stage in enumerate((*STAGES, "other"))}
    for name, values in columns.items():
        label = f"{name}  {sum(values) / total:.0%}"
        hatch = "//" if name in OUTSIDE_THE_STEP else None
        top = [base + value for base, value in zip(bottom, values, strict=True)]
        if len(steps) <= BARS:
            axis.bar(
                steps, values, 0.8, bottom, color=palette[name], label=label, hatch=hatch, edgecolor="white", lw=0.3
            )
        else:
            axis.fill_between(steps, bottom, top, color=palette[name], label=label, linewidth=0, hatch=hatch)
        bottom = top
    axis.set_title("Where the seconds of a step go", loc="left")
    axis.set_ylabel("seconds")
    axis.set_ylim(bottom=0)
    axis.margins(x=0.01)
    if len(steps) < 6:  # a few bars, not a few walls
        axis.set_xlim(steps[0] - 0.7, max(steps[-1] + 0.7, steps[0] + 5.3))
        axis.set_xticks(steps)
    handles, labels = axis.get_legend_handles_labels()
    # Top of the stack first, as it is drawn.
    axis.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), title="share of the time")


def _means(values: Sequence[float], width: int) -> list[float]:
    parts = [values[start : start + width] for start in range(0, len(values), width)]
    return [sum(part) / len(part) for part in parts]


def _stage_colour(number: int) -> Any:
    from matplotlib import colormaps

    return colormaps["tab20"](number % 20)


def _whole_steps(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _style() -> Any:
    return {
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "font.size": 10,
        "grid.alpha": 0.3,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "lines.linewidth": 1.8,
    }
