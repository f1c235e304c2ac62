"""What `step.py` reads out of one run of the job: journal, metrics, and the notes of `step_probe`.

A step lasts from the moment the weights of the step before are on the servers to the moment its own are. All times are
unix seconds of one machine.

    work        a note of the probe: somebody computed from `start` to `end`
    overhead    the part of a step in which nobody computed, scored or moved weights
    gap         a piece of the overhead, named by the work before and after it
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WORK = ("generate", "reward", "log-probs", "update", "weight sync")


@dataclass
class StepFigures:
    """One step of our side; seconds unless named otherwise.

    Fields:
        stages: `timing_s/*` of the step.
        work: how long each kind of work ran, overlaps within a kind counted once.
        gaps: "generate -> reward": seconds.
        to_stage_ms, to_engine_ms: from the last trajectory's arrival in the queue to the start of the next stage on the
            controller (None without a journal), and to the first computation of that stage in the trainer process.
    """

    step: int
    seconds: float
    rows: int
    new_tokens: int
    prompt_tokens: int
    stages: dict[str, float]
    work: dict[str, float]
    overhead_s: float
    to_stage_ms: float | None
    to_engine_ms: float
    gaps: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return asdict(self)


@dataclass(frozen=True)
class Note:
    """A line of the probe."""

    kind: str
    start: float
    end: float
    facts: dict[str, Any]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a half-written last line is left out."""
    found = []
    for text in path.read_text(encoding="utf-8").split("\n"):
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def read_notes(folder: Path) -> list[Note]:
    """All notes of a run, by start."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in read_lines(path)]
    notes = [Note(line.pop("kind"), line.pop("start"), line.pop("end"), line) for line in lines]
    return sorted(notes, key=lambda note: note.start)


def first_rollout(notes: Iterable[Note]) -> float:
    """When the rollout engine made its first step."""
    return min(note.start for note in notes if note.kind == "generate")


def step_figures(run: Path, probe: Path) -> list[StepFigures]:
    """The steps of a run in order.

    Raises:
        ValueError: the probe or the metrics lack a step.
    """
    notes = read_notes(probe)
    numbers: dict[int, dict[str, float]] = defaultdict(dict)
    for line in read_lines(run / "metrics.jsonl"):
        numbers[int(line["step"])].update(line["data"])
    journal = read_lines(run / "events.jsonl") if (run / "events.jsonl").is_file() else []
    sync_end = {int(note.facts["version"]): note.end for note in notes if note.kind == "weight sync"}
    steps = []
    for step in sorted(sync_end):
        if step == 0:
            continue
        if step - 1 not in sync_end or step not in numbers:
            raise ValueError(f"step {step} of {run} left no metrics, or no note of the weight sync before it")
        window = (sync_end[step - 1], sync_end[step])
        steps.append(_one_step(step, window, notes, numbers[step], journal))
    return steps


def _one_step(
    step: int, window: tuple[float, float], notes: list[Note], numbers: dict[str, float], journal: list[dict[str, Any]]
) -> StepFigures:
    inside = [note for note in notes if note.end > window[0] and note.start < window[1]]
    work = {kind: [n for n in inside if n.kind == kind] for kind in WORK}
    arrivals = [note.end for note in inside if note.kind == "arrival"]
    trained = [*work["log-probs"], *work["update"]]
    if not arrivals or not trained:
        raise ValueError(f"step {step}: the probe saw {len(arrivals)} arrivals, {len(trained)} passes of the trainer")
    arrived = max(arrivals)
    # Fused with the update there is no log-prob pass; the stage after generation is then the advantage.
    started = [
        line["start"]
        for line in journal
        if line.get("event") == "stage" and line.get("stage") != "gen" and line.get("step") == step
    ]
    gaps = find_gaps([note for kind in WORK for note in work[kind]], window)
    rows = len(arrivals)
    return StepFigures(
        step=step,
        seconds=window[1] - window[0],
        rows=rows,
        new_tokens=round(numbers["response_length/mean"] * rows),
        prompt_tokens=round(numbers["prompt_length/mean"] * rows),
        stages={name.removeprefix("timing_s/"): v for name, v in numbers.items() if name.startswith("timing_s/")},
        work={kind: covered(found, window) for kind, found in work.items()},
        overhead_s=sum(gaps.values()),
        to_stage_ms=1e3 * (min(started) - arrived) if started else None,
        to_engine_ms=1e3 * (min(note.start for note in trained) - arrived),
        gaps=gaps,
    )


def covered(notes: Iterable[Note], window: tuple[float, float]) -> float:
    """Seconds of the window in which at least one of the notes ran."""
    total, reached = 0.0, window[0]
    for note in sorted(notes, key=lambda note: note.start):
        start, end = max(note.start, reached), min(note.end, window[1])
        if end > start:
            total, reached = total + end - start, end
    return total


def find_gaps(notes: Iterable[Note], window: tuple[float, float]) -> dict[str, float]:
    """The idle pieces of the window: "work before -> work after": seconds. It begins and ends with a weight sync."""
    gaps: dict[str, float] = defaultdict(float)
    reached, before = window[0], "weight sync"
    for note in sorted(notes, key=lambda note: note.start):
        if note.end <= reached:
            continue
        if note.start > reached:
            gaps[f"{before} -> {note.kind}"] += note.start - reached
        reached, before = note.end, note.kind
    return dict(gaps)
