"""The best checkpoint of a run: `best_checkpoint.json` in its folder.

    {"step": 40, "metric": "val-core/openai/gsm8k/reward/mean@1", "value": 0.61, "path": ".../global_step_40",
     "history": [{"step": 20, "value": 0.52, "saved": true}, ...]}

Invariants
    - `step` and `path` name a checkpoint that was saved and validated and is still there. A better validation of a
      step that was not saved stands in `history` only; `path` is null as long as no validated step was saved.
    - The file follows from `history`, which has one entry a validation; a lost one is made again from `metrics.jsonl`.
      A run that goes back to an earlier checkpoint forgets the validations it will do again.
    - Of equal values the earlier step is the best: the later one is no improvement.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlflow.checkpoint import atomic_write_text, step_folder
from rlflow.observe.feed import notice
from rlflow.observe.journal import METRICS, read_lines

logger = logging.getLogger(__name__)

BEST = "best_checkpoint.json"


def mark_best(run_folder: Path, step: int, metrics: dict[str, Any], saved: bool, config: Any) -> bool:
    """Note a validation; call it once the step's checkpoint, if there is one, is complete.

    Args:
        run_folder: where the file and the checkpoints are.
        step: the step that was validated.
        metrics: its numbers; without validation metrics nothing is noted.
        saved: whether this step has a checkpoint.
        config: `trainer.best_metric` (null = the metric of the file, else the first `val-core` mean by name) and
            `trainer.best_mode`.

    Returns:
        Whether this step is the best checkpoint now.
    """
    if not any(name.startswith("val-") for name in metrics):
        return False  # most steps validate nothing, and need no look at the disk
    state = _read(run_folder)
    metric = config.trainer.best_metric or state.get("metric") or first_core_mean(metrics)
    if metric is None:
        return False
    if metric not in metrics:
        known = ", ".join(sorted(name for name in metrics if name.startswith("val-core/")))
        notice(f"trainer.best_metric={metric} is no metric of the validation, so no checkpoint is marked: {known}")
        return False
    value = float(metrics[metric])
    before = state.get("history", []) if state.get("metric") == metric else _from_disk(run_folder, metric, step)
    history = [entry for entry in before if entry["step"] < step]
    if math.isfinite(value):
        history.append({"step": step, "value": value, "saved": bool(saved)})
    best = _write(run_folder, metric, history, config.trainer.best_mode)
    return bool(saved) and best == step


def mark_saved(run_folder: Path, step: int, config: Any) -> bool:
    """Note that a validated step has a checkpoint by now; returns whether it is the best one."""
    state = _read(run_folder)
    entry = next((entry for entry in state.get("history", []) if entry["step"] == step), None)
    if entry is None:
        return False
    entry["saved"] = True
    return _write(run_folder, state["metric"], state["history"], config.trainer.best_mode) == step


def best_steps(run_folder: Path, config: Any) -> list[int]:
    """The steps of the `trainer.max_best_ckpt_to_keep` best checkpoints on the disk, to keep them from being deleted.

    Those of earlier runs in the folder count too.
    """
    state = _read(run_folder)
    ranked = _ranked(run_folder, state.get("history", []), config.trainer.best_mode)
    return [entry["step"] for entry in ranked[: config.trainer.max_best_ckpt_to_keep]]


def forget_best_after(run_folder: Path, step: int, config: Any) -> None:
    """The run goes on from `step`: what was validated later will be validated again."""
    state = _read(run_folder)
    history = state.get("history", [])
    kept = [entry for entry in history if entry["step"] <= step]
    if len(kept) < len(history):
        _write(run_folder, state["metric"], kept, config.trainer.best_mode)


def first_core_mean(metrics: dict[str, Any]) -> str | None:
    """The first headline mean by name; None when there is none."""
    return min((name for name in metrics if name.startswith("val-core/") and "/mean@" in name), default=None)


def _write(run_folder: Path, metric: str, history: list[dict[str, Any]], mode: str) -> int | None:
    """Write the file; returns the step of the best checkpoint."""
    saved = _ranked(run_folder, history, mode)
    best = next(iter(saved or sorted(history, key=_order(mode))), None)
    state = {
        "step": best["step"] if best else None,
        "metric": metric,
        "value": best["value"] if best else None,
        "path": str(step_folder(run_folder, best["step"])) if best and saved else None,
        "history": history,
    }
    atomic_write_text(run_folder / BEST, json.dumps(state, indent=2) + "\n")
    return best["step"] if best and saved else None


def _order(mode: str) -> Callable[[dict[str, Any]], tuple[float, int]]:
    """Sorts the better value first, and of equal values the smaller step."""
    sign = -1 if mode == "max" else 1
    return lambda entry: (sign * entry["value"], entry["step"])


def _ranked(run_folder: Path, history: list[dict[str, Any]], mode: str) -> list[dict[str, Any]]:
    """The validations whose checkpoints are there, the best first."""
    there = [entry for entry in history if entry["saved"] and step_folder(run_folder, entry["step"]).is_dir()]
    return sorted(there, key=_order(mode))


def _from_disk(run_folder: Path, metric: str, before: int) -> list[dict[str, Any]]:
    """The history as numbers and checkpoints of the run tell it, for a file that is lost or of another metric."""
    path = run_folder / METRICS
    values = {}
    for line in read_lines(path) if path.is_file() else ():
        value, step = (line.get("data") or {}).get(metric), line.get("step")
        if isinstance(value, (int, float)) and isinstance(step, int) and step < before:
            values[step] = float(value)
    return [
        {"step": step, "value": value, "saved": step_folder(run_folder, step).is_dir()}
        for step, value in sorted(values.items())
    ]


def _read(run_folder: Path) -> dict[str, Any]:
    path = run_folder / BEST
    try:
        state = json.loads(path.read_text())
        entries = state.get("history", [])
        if all(isinstance(entry["step"], int) and math.isfinite(entry["value"]) for entry in entries):
            return dict(state)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s is unreadable (%s); the best checkpoint is looked for anew", path, error)
    return {}
