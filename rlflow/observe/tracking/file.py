"""JSONL tracker: one line `{"step": ..., "data": {...}}` a step.

Invariants: a line is on disk when `log` returns, and a resumed run appends: the history of a run is never cut off.
The path is $RLFLOW_FILE_LOGGER_PATH, or {$RLFLOW_FILE_LOGGER_ROOT or .}/{project}/{experiment}.jsonl (the VERL_*
names are read too).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def _env(name: str) -> str | None:
    return os.environ.get(f"RLFLOW_{name}") or os.environ.get(f"VERL_{name}")


def log_path(project: str, experiment: str) -> Path:
    """Where the tracker of this run writes."""
    path = _env("FILE_LOGGER_PATH")
    if path:
        return Path(path).expanduser()
    return Path(_env("FILE_LOGGER_ROOT") or ".").expanduser() / project / f"{experiment}.jsonl"


class FileBackend:
    """Appends to one file."""

    def __init__(self, project: str, experiment: str, config: Any = None) -> None:
        self.path = log_path(project, experiment)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, data: dict[str, Any], step: int) -> None:
        """Append a line; values that are no finite number become null."""
        numbers = {name: _number(value) for name, value in data.items()}
        self._file.write(json.dumps({"step": step, "data": numbers}) + "\n")
        self._file.flush()

    def log_samples(self, samples: Sequence[tuple[str, str, float | None]], step: int) -> None:
        """Samples are in the validation dump; nothing to add here."""

    def finish(self, exit_code: int) -> None:
        """Close the file."""
        self._file.close()


def _number(value: Any) -> float | int | None:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if math.isfinite(value) else None
