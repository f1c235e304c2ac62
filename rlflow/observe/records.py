"""Reading a run folder: its journal, metrics, token-level records and configuration.

Invariants
    - A run may still be going: the last line of a file may be half written. It is left out, never an error.
    - Unknown events and unknown fields are kept or ignored, so that a newer run can be read by an older reader.
    - Non-finite numbers come out as None.

    folder = RunFolder("checkpoints/tiny/run")
    journal = folder.journal()
    journal.accounting("train")            # issued = running + finished + trained + dropped
    for row in folder.trajectories(3, "train"):
        row.key, row.reward, row.series["advantages"]
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import psutil

from rlflow.observe.events import Event, Journal
from rlflow.observe.recorder import LOCK, LOCK_OWNER
from rlflow.utils.errors import RlflowError

EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
TRAJECTORIES = "trajectories"
# The response-aligned numbers a record may carry, in the order in which a step writes them.
SERIES = (
    "rollout_log_probs",
    "rm_scores",
    "old_log_probs",
    "entropy",
    "sum_pi_squared",
    "rollout_is_weights",
    "ref_log_prob",
    "values",
    "token_level_rewards",
    "advantages",
    "returns",
)
_TRAJECTORY_FILE = re.compile(r"^(val_)?(\d+)\.jsonl$")


class RunFolderError(RlflowError):
    """A folder is no run folder, or a record asked for is not in it."""


@dataclass(frozen=True)
class Lineage:
    """Who wrote a field, when (unix seconds), and under which weight version."""

    writer: str
    time: float | None
    version: int | None


@dataclass
class Trajectory:
    """One output of one session, token by token; every list but the prompt's is aligned with `response_ids`."""

    key: str
    uid: str
    session: int = 0
    index: int = 0
    step: int = 0
    partition: str = "train"
    data_source: str | None = None
    ground_truth: Any = None
    is_final: bool = True
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    prompt_text: str = ""
    response_text: str = ""
    prompt_tokens: list[str] = field(default_factory=list)
    response_tokens: list[str] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    reward: float | None = None
    invalid: str | None = None
    reward_extra_info: dict[str, Any] = field(default_factory=dict)
    stop_reason: str | None = None
    num_turns: int | None = None
    min_version: int | None = None
    max_version: int | None = None
    worker: str | None = None
    started: float | None = None
    ended: float | None = None
    timings: dict[str, float] = field(default_factory=dict)
    lineage: dict[str, Lineage] = field(default_factory=dict)
    series: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def advantage(self) -> float | None:
        """Mean advantage over the tokens that train; None when the record has none."""
        values = self.series.get("advantages", [])
        kept = [v for v, m in zip(values, self.response_mask, strict=False) if m and v is not None]
        return sum(kept) / len(kept) if kept else None


_PLAIN = {f.name for f in fields(Trajectory)} - {"series", "lineage"}


def parse_trajectory(line: dict[str, Any]) -> Trajectory | None:
    """A record from its JSON object; None for an object without a key."""
    if not isinstance(line.get("key"), str):
        return None
    # null stands for "not known" and leaves the default.
    plain = {name: value for name, value in line.items() if name in _PLAIN and value is not None}
    plain.setdefault("uid", line["key"].rsplit("_", 2)[0])
    lineage = {
        name: Lineage(str(item.get("writer") or "?"), item.get("time"), item.get("version"))
        for name, item in (line.get("lineage") or {}).items()
        if isinstance(item, dict)
    }
    series = {name: line[name] for name in SERIES if isinstance(line.get(name), list)}
    return Trajectory(**plain, lineage=lineage, series=series)


@dataclass(frozen=True)
class TrajectoryFile:
    """A file of token-level records."""

    step: int
    partition: str
    path: Path


class RunFolder:
    """A run folder on disk. RunFolderError when `path` is none."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise RunFolderError(f"{self.path} is no folder; give the run's trainer.default_local_dir")
        if not (self.path / EVENTS).is_file():
            raise RunFolderError(
                f"{self.path} has no {EVENTS}, so it is no run folder: that is the folder a run writes to, "
                f"trainer.default_local_dir{self._nearby()}"
            )

    def _nearby(self) -> str:
        found = sorted(path.parent for path in self.path.glob(f"*/{EVENTS}"))
        found += sorted(path.parent for path in self.path.glob(f"*/*/{EVENTS}"))
        return f"; did you mean {' or '.join(str(path) for path in found[:3])}?" if found else ""

    def journal(self) -> Journal:
        """All events so far."""
        lines = JsonObjects(self.path / EVENTS)
        events = []
        for line in lines:
            if isinstance(line.get("event"), str):
                rest = {name: value for name, value in line.items() if name not in ("event", "time", "step")}
                events.append(Event(line["event"], float(line.get("time") or 0), int(line.get("step") or 0), rest))
        return Journal(events, lines.damaged)

    def writer_lives(self) -> bool | None:
        """Whether the process that last wrote here still lives; None where this machine cannot tell.

        The lock file is read, not locked: a run that starts at this moment must get its lock.
        """
        path = self.path / LOCK
        try:
            owner = LOCK_OWNER.match(path.read_text(encoding="utf-8"))
            locked = path.stat().st_mtime
        except OSError:
            return None
        if owner is None or owner["node"] != os.uname().nodename:
            return None
        try:
            # A process made after the lock has only inherited the number.
            return psutil.Process(int(owner["pid"])).create_time() <= locked + 1
        except psutil.NoSuchProcess:
            return False
        except psutil.Error:
            return None

    def metrics(self) -> dict[int, dict[str, float | None]]:
        """Numbers by step, in order of the steps; lines of one step are merged."""
        path = self.path / METRICS
        merged: dict[int, dict[str, float | None]] = {}
        for line in JsonObjects(path) if path.is_file() else ():
            data = line.get("data")
            if isinstance(data, dict):
                numbers = {name: value for name, value in data.items() if value is None or _is_number(value)}
                merged.setdefault(int(line.get("step") or 0), {}).update(numbers)
        return dict(sorted(merged.items()))

    def trajectory_files(self) -> list[TrajectoryFile]:
        """The files of token-level records: by step, validation before the training of the same step."""
        found = []
        for path in (self.path / TRAJECTORIES).glob("*.jsonl"):
            match = _TRAJECTORY_FILE.match(path.name)
            if match:
                found.append(TrajectoryFile(int(match[2]), "val" if match[1] else "train", path))
        return sorted(found, key=lambda item: (item.step, item.partition != "val"))

    def trajectories(self, step: int, partition: str) -> list[Trajectory]:
        """The records of one step, by uid, session and output; empty when there is no file."""
        prefix = "val_" if partition == "val" else ""
        path = self.path / TRAJECTORIES / f"{prefix}{step}.jsonl"
        rows = [parse_trajectory(line) for line in JsonObjects(path)] if path.is_file() else []
        return sorted((row for row in rows if row), key=lambda row: (_natural(row.uid), row.session, row.index))

    def config_text(self) -> str | None:
        """`config.yaml`, or None."""
        path = self.path / "config.yaml"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None

    def best_checkpoint(self) -> dict[str, Any] | None:
        """{"step", "metric", "value", "path"} of the best checkpoint, or None."""
        try:
            value = json.loads((self.path / "best_checkpoint.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None


class JsonObjects:
    """The objects of a JSON-lines file; `damaged` counts whole lines that are no object, once iterated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.damaged = 0
        # Bytes: only \n ends a line, while text mode would also cut at separators inside a string.
        with self.path.open("rb") as file:
            for raw in file:
                if not raw.strip():
                    continue
                try:
                    value = json.loads(raw, parse_constant=lambda _: None)
                except (ValueError, RecursionError):
                    value = None
                if isinstance(value, dict):
                    yield value
                elif raw.endswith(b"\n"):
                    self.damaged += 1


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _natural(text: str) -> list[tuple[int, int, str]]:
    """Sort key under which `e0r10a0` follows `e0r9a0`."""
    parts = re.split(r"(\d+)", text)
    return [(1, int(part), "") if part.isdecimal() and len(part) < 18 else (0, 0, part) for part in parts]
