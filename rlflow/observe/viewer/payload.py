"""What the viewer's scripts load: the run's curves, an index of all trajectories, and one file a step.

Pages opened from disk may not fetch files, but may load scripts. So each file is a script that hands over a string of
JSON; it is pure ASCII, which leaves nothing in it that a browser or an encoding could take for something else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from rlflow.observe.events import Journal
from rlflow.observe.records import Trajectory, TrajectoryFile
from rlflow.observe.trace import fields_of, states_of
from rlflow.observe.viewer import summary

DIGITS = 6
SNIPPET = 140
# One entry a column of the index; a row is a list in this order.
INDEX = ("key", "file", "reward", "advantage", "tokens", "invalid", "stop", "source", "final", "text")


def script(name: str, value: Any) -> str:
    """A script that hands `value` to the viewer under `name`."""
    # A string of JSON, not a literal: faster to parse, and a key like __proto__ stays an ordinary key.
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, default=str)
    return f"RLFLOW.add({json.dumps(name)},JSON.parse({json.dumps(text)}));\n"


def file_name(file: TrajectoryFile) -> str:
    """Name of a step's payload: train-3, val-0."""
    return f"{file.partition}-{file.step}"


def run_payload(journal: Journal, metrics: summary.Metrics, files: Iterable[TrajectoryFile]) -> dict[str, Any]:
    """Curves with what they mean, stages, prompts by state and step."""
    steps = list(metrics)
    names = sorted({name for row in metrics.values() for name, value in row.items() if value is not None})
    return {
        "steps": steps,
        "metrics": {name: [_round(metrics[step].get(name)) for step in steps] for name in names},
        "charts": summary.charts(metrics),
        "help": {name: text for name in names if (text := summary.explain(name))},
        "stages": [
            [span.step, span.stage, round(span.start, 3), round(span.end, 3), span.rows, span.version]
            for span in sorted(journal.spans, key=lambda span: span.start)
        ],
        "accounting": _accounting_by_step(journal),
        "files": [[file_name(file), file.step, file.partition] for file in files],
    }


def _accounting_by_step(journal: Journal) -> list[list[Any]]:
    """[step, partition, issued, running, finished, trained, dropped], by the step that issued the prompts."""
    counted: dict[tuple[int, str], list[int]] = {}
    states = ("running", "finished", "trained", "dropped")
    for life in journal.prompts.values():
        row = counted.setdefault((life.step, life.partition), [0, 0, 0, 0, 0])
        row[0] += 1
        row[1 + states.index(life.state)] += 1
    return [[step, partition, *row] for (step, partition), row in sorted(counted.items())]


def step_payload(journal: Journal, file: TrajectoryFile, rows: list[Trajectory]) -> dict[str, Any]:
    """The trajectories of one file with their lives; equal prompts are stored once."""
    prompts: dict[str, int] = {}
    texts: list[dict[str, Any]] = []
    shown = []
    for row in rows:
        identity = json.dumps([row.prompt_text, row.prompt_ids])
        if identity not in prompts:
            prompts[identity] = len(texts)
            texts.append({"text": row.prompt_text, "tokens": row.prompt_tokens, "ids": row.prompt_ids})
        shown.append(_trajectory(journal, row, prompts[identity]))
    uids = dict.fromkeys(row.uid for row in rows)
    return {
        "step": file.step,
        "partition": file.partition,
        "prompts": texts,
        "trajectories": shown,
        "lives": {uid: _life(journal, file.partition, uid) for uid in uids},
        "stages": [
            {"stage": s.stage, "start": s.start, "end": s.end, "rows": s.rows, "version": s.version}
            for s in journal.spans_of(file.step)
            if (s.stage == "testing") == (file.partition == "val")
        ],
    }


def _life(journal: Journal, partition: str, uid: str) -> dict[str, Any] | None:
    life = journal.prompts.get((partition, uid))
    return None if life is None else {**vars(life), "state": life.state}


def _trajectory(journal: Journal, row: Trajectory, prompt: int) -> dict[str, Any]:
    life = journal.prompts.get((row.partition, row.uid))
    left_out = ("series", "lineage", "prompt_ids", "prompt_text", "prompt_tokens")
    plain = {name: _clean(value) for name, value in vars(row).items() if name not in left_out}
    return {
        **plain,
        "prompt": prompt,
        "advantage": _round(row.advantage),
        "series": {name: [_round(value) for value in values] for name, values in row.series.items()},
        "states": [[s.name, s.start, s.end, s.note] for s in states_of(journal, life, row, row.step)],
        "fields": [
            [f.name, f.writer, f.time, f.version, [[r.stage, r.time, r.optional] for r in f.readers]]
            for f in fields_of(journal, row, row.step)
        ],
    }


def index_row(file: TrajectoryFile, row: Trajectory) -> list[Any]:
    """A trajectory in the list of all, as `INDEX` says."""
    text = " ".join(row.response_text[:SNIPPET].split())
    return [
        row.key,
        file_name(file),
        _round(row.reward),
        _round(row.advantage),
        len(row.response_ids),
        row.invalid,
        row.stop_reason,
        row.data_source,
        int(row.is_final),
        text,
    ]


def text_rows(rows: list[Trajectory]) -> list[list[str]]:
    """What full-text search looks through: key, lower-case text of prompt, response and truth."""
    return [
        [row.key, "\n".join((row.prompt_text, row.response_text, str(row.ground_truth or ""))).lower()] for row in rows
    ]


def _round(value: Any) -> Any:
    """Six significant digits; what is not finite becomes None."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    if not math.isfinite(value):
        return None
    if isinstance(value, int):
        return value
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _clean(value: Any) -> Any:
    """Numbers that JSON has no form for become None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _clean(item) for name, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, (list, tuple)) else value
