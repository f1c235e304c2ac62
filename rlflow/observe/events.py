"""The journal of a run as typed facts: starts, stages, and the life of every prompt.

Invariant: issued = running + finished + trained + dropped, for every partition at any time (`Journal.accounting`).
Events of unknown names are kept in `Journal.events` and take part in nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Event:
    """One line of the journal; `data` holds everything but the three fields every line has."""

    event: str
    time: float
    step: int
    data: dict[str, Any]


@dataclass(frozen=True)
class StageDeclaration:
    """What a stage of a step reads and writes, as the run declared it at its start."""

    stage: str
    group: str
    method: str
    reads: tuple[str, ...]
    optional_reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class RunStart:
    """One start of the run; a resumed run has several."""

    time: float
    run_id: str
    rlflow: str
    total_steps: int
    resumed_from: int | None
    world_size: int
    stages: tuple[StageDeclaration, ...]


@dataclass(frozen=True)
class StageSpan:
    """A stage that ran: unix seconds, and the fields that were really read and written."""

    stage: str
    step: int
    start: float
    end: float
    rows: int
    version: int | None
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass
class PromptLife:
    """What the journal knows about one prompt of a partition; times in unix seconds, None = has not happened."""

    uid: str
    partition: str
    step: int
    sessions: int
    issued: float
    version: int | None
    times_issued: int = 1
    finished: float | None = None
    status: str | None = None
    reason: str | None = None
    sessions_failed: int = 0
    ended: float | None = None
    outcome: str | None = None
    outcome_step: int | None = None
    outcome_version: int | None = None

    @property
    def state(self) -> str:
        """running | finished | trained | dropped."""
        if self.outcome:
            return self.outcome
        return "running" if self.finished is None else "finished"


@dataclass(frozen=True)
class Accounting:
    """Prompts by state; `issued` is the sum of the other four."""

    issued: int
    running: int
    finished: int
    trained: int
    dropped: int


class Journal:
    """The events of a run in order, and what follows from them. `damaged`: lines that are no JSON objects."""

    def __init__(self, events: list[Event], damaged: int = 0) -> None:
        self.events = events
        self.damaged = damaged
        self.starts: list[RunStart] = []
        self.spans: list[StageSpan] = []
        self.prompts: dict[tuple[str, str], PromptLife] = {}
        self._partitions: set[str] = set()
        for event in events:
            handler = getattr(self, f"_on_{event.event}", None)
            if handler is not None:
                handler(event, event.data)

    def of(self, *names: str) -> list[Event]:
        """The events of those names, in order."""
        return [event for event in self.events if event.event in names]

    def spans_of(self, step: int) -> list[StageSpan]:
        """The stages of a step by their start."""
        return self._spans_by_step.get(step, [])

    @cached_property
    def _spans_by_step(self) -> dict[int, list[StageSpan]]:
        found: dict[int, list[StageSpan]] = {}
        for span in sorted(self.spans, key=lambda span: span.start):
            found.setdefault(span.step, []).append(span)
        return found

    @cached_property
    def last_step(self) -> int:
        """The highest step anything was recorded for."""
        return max((event.step for event in self.events), default=0)

    @property
    def stages(self) -> tuple[StageDeclaration, ...]:
        """The declarations of the newest start."""
        return self.starts[-1].stages if self.starts else ()

    @cached_property
    def end(self) -> Event | None:
        """The `run_ended` line of the newest start; None while the run goes on (or was killed)."""
        last_start = self.starts[-1].time if self.starts else 0.0
        ended = [event for event in self.of("run_ended") if event.time >= last_start]
        return ended[-1] if ended else None

    @property
    def partitions(self) -> list[str]:
        """Partitions with a prompt, train first."""
        return sorted(self._partitions, key=lambda name: (name != "train", name))

    def prompt(self, uid: str) -> PromptLife | None:
        """The prompt of that uid in whichever partition."""
        known = (self.prompts.get((partition, uid)) for partition in self.partitions)
        return next((life for life in known if life is not None), None)

    def accounting(self, partition: str, step: int | None = None) -> Accounting:
        """Prompts by state, of one step (that issued them) or of all."""
        lives = [
            life
            for (name, _), life in self.prompts.items()
            if name == partition and (step is None or life.step == step)
        ]
        states = [life.state for life in lives]
        return Accounting(len(lives), *(states.count(name) for name in ("running", "finished", "trained", "dropped")))

    def _on_run_started(self, event: Event, data: dict[str, Any]) -> None:
        self.starts.append(
            RunStart(
                time=event.time,
                run_id=str(data.get("run_id", "")),
                rlflow=str(data.get("rlflow", "")),
                total_steps=int(data.get("total_steps") or 0),
                resumed_from=data.get("resumed_from"),
                world_size=int(data.get("world_size") or 1),
                stages=tuple(
                    StageDeclaration(
                        stage=str(item.get("stage", "")),
                        group=str(item.get("group", "")),
                        method=str(item.get("method", "")),
                        reads=tuple(item.get("reads") or ()),
                        optional_reads=tuple(item.get("optional_reads") or ()),
                        writes=tuple(item.get("writes") or ()),
                    )
                    for item in data.get("stages") or ()
                ),
            )
        )

    def _on_stage(self, event: Event, data: dict[str, Any]) -> None:
        self.spans.append(
            StageSpan(
                stage=str(data.get("stage", "")),
                step=event.step,
                start=float(data.get("start") or event.time),
                end=float(data.get("end") or event.time),
                rows=int(data.get("rows") or 0),
                version=data.get("version"),
                reads=tuple(data.get("reads") or ()),
                writes=tuple(data.get("writes") or ()),
            )
        )

    def _on_issued(self, event: Event, data: dict[str, Any]) -> None:
        partition = str(data.get("partition", "train"))
        self._partitions.add(partition)
        for uid in data.get("uids") or ():
            earlier = self.prompts.get((partition, uid))
            # A prompt that a killed run left unfinished is issued again: its life starts over.
            self.prompts[partition, uid] = PromptLife(
                uid=uid,
                partition=partition,
                step=event.step,
                sessions=int(data.get("sessions") or 1),
                issued=event.time,
                version=data.get("version"),
                times_issued=earlier.times_issued + 1 if earlier else 1,
            )

    def _on_finished(self, event: Event, data: dict[str, Any]) -> None:
        life = self.prompts.get((str(data.get("partition", "train")), str(data.get("uid"))))
        if life is not None:
            life.finished = event.time
            life.status = data.get("status")
            life.reason = data.get("reason")
            life.sessions_failed = int(data.get("sessions_failed") or 0)

    def _on_trained(self, event: Event, data: dict[str, Any]) -> None:
        self._close(event, data, "trained")

    def _on_dropped(self, event: Event, data: dict[str, Any]) -> None:
        self._close(event, data, "dropped")

    def _close(self, event: Event, data: dict[str, Any], outcome: str) -> None:
        for uid in data.get("uids") or ():
            life = self.prompts.get(("train", uid)) or self.prompt(uid)
            if life is not None:
                life.outcome, life.ended, life.outcome_step = outcome, event.time, event.step
                life.outcome_version = data.get("version")
                life.reason = data.get("reason") or life.reason
