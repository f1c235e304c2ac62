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

from rlflow.observe.tracking.backend import RunInfo, Sample
from rlflow.utils.errors import ConfigError
from rlflow.utils.metric import as_number


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

    def __init__(self, info: RunInfo) -> None:
        self.path = log_path(info.project, info.experiment)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"trainer.logger names file, but {self.path} cannot be written: {error}.\n"
                "    try:    RLFLOW_FILE_LOGGER_ROOT=a folder of yours"
            ) from error

    def log(self, data: dict[str, Any], step: int) -> None:
        """Append a line; values that are no finite number become null."""
        plain = {name: as_number(value) for name, value in data.items()}
        finite = {name: value if value is not None and math.isfinite(value) else None for name, value in plain.items()}
        self._file.write(json.dumps({"step": step, "data": finite}) + "\n")
        self._file.flush()

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Samples are in the validation dump; nothing to add here."""

    def finish(self, exit_code: int) -> None:
        """Close the file."""
        self._file.close()
