"""The live table in the terminal: a progress bar and one line a step.

On a terminal the bar is redrawn in place; in a pipe or a log file there are only lines, each complete when it is
written.
"""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

# (title, metric, format, width)
COLUMNS: list[tuple[str, str, str, int]] = [
    ("step", "training/global_step", ".0f", 5),
    ("reward", "critic/score/mean", ".3f", 7),
    ("length", "response_length/mean", ".1f", 7),
    ("entropy", "actor/entropy", ".3f", 8),
    ("kl", "actor/ppo_kl", ".1e", 9),
    ("pg loss", "actor/pg_loss", ".4f", 9),
    ("grad", "actor/grad_norm", ".2f", 6),
    ("lr", "actor/lr", ".1e", 8),
    ("lp diff", "training/rollout_log_probs_diff/mean", ".1e", 8),
    ("gen s", "timing_s/gen", ".1f", 6),
    ("update s", "timing_s/update_actor", ".1f", 9),
    ("step s", "timing_s/step", ".1f", 7),
]
HEADER_EVERY = 20


class LiveTable:
    """Shows events of the trainer: progress, step, samples, notice, finish."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(soft_wrap=True, highlight=False)
        self._lines = 0
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def show(self, event: dict[str, Any]) -> None:
        """Show one event."""
        handler = getattr(self, f"_show_{event['type']}", None)
        if handler is not None:
            handler(event)

    def close(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _show_notice(self, event: dict[str, Any]) -> None:
        self.console.print(event["text"], markup=False)

    def _show_progress(self, event: dict[str, Any]) -> None:
        if not self.console.is_terminal:
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TimeElapsedColumn(),
                console=self.console,
                transient=True,
            )
            self._progress.start()
            self._task = self._progress.add_task("")
        assert self._task is not None
        self._progress.update(self._task, description=event["text"], completed=event["done"], total=event["total"])

    def _show_step(self, event: dict[str, Any]) -> None:
        data = event["data"]
        if "training/global_step" in data:
            if self._lines % HEADER_EVERY == 0:
                self.console.print(" ".join(title.rjust(width) for title, _, _, width in COLUMNS), style="bold")
            self._lines += 1
            self.console.print(" ".join(_cell(data.get(name), form, width) for _, name, form, width in COLUMNS))
        headline = [f"{name} {value:.4g}" for name, value in sorted(data.items()) if name.startswith("val-core/")]
        if headline:
            self.console.print(
                f"validation at step {event['step']}: " + ", ".join(headline), style="bold", markup=False
            )

    def _show_samples(self, event: dict[str, Any]) -> None:
        for prompt, output, score in event["samples"]:
            shown = "invalid" if score is None else f"{score:g}"
            self.console.print(f"  [{shown}] {prompt[-120:]!r} -> {output[:200]!r}", markup=False)

    def _show_finish(self, event: dict[str, Any]) -> None:
        self.close()


def _cell(value: float | None, form: str, width: int) -> str:
    return ("-" if value is None or math.isnan(value) else format(value, form)).rjust(width)
