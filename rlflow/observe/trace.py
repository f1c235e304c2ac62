"""The life of one key: what happened to a trajectory when, who wrote its fields and who reads them next.

A key is `{uid}_{session}_{index}`; a uid stands for its whole group. Everything comes from the run folder, so it works
while the run goes on: a key that has no token-level record yet has its lines of the journal.

    trace = trace_key(RunFolder("checkpoints/tiny/run"), "e0r3a0_1_0")
    trace.states[0].name        # "issued"
    trace.fields[0].next_reader # the stage that reads the field next
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any

from rlflow.observe.events import Journal, PromptLife
from rlflow.observe.records import RunFolder, RunFolderError, Trajectory
from rlflow.observe.visible import visible

# Stages of a step that handle no rows of the batch.
NOT_OF_ROWS = frozenset({"gen", "update_weights", "save_checkpoint", "testing"})


@dataclass(frozen=True)
class State:
    """Something that happened to a key: unix seconds (`end` None for a moment), and what there is to say about it."""

    name: str
    start: float
    end: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Read:
    """A stage that reads a field; `time` is when it did, None when the journal does not say."""

    stage: str
    time: float | None
    optional: bool = False


@dataclass(frozen=True)
class FieldLife:
    """A field of the key: written by whom, when (unix seconds), under which weights, and its readers in order."""

    name: str
    writer: str
    time: float | None
    version: int | None
    readers: tuple[Read, ...]

    @property
    def next_reader(self) -> str | None:
        """The stage that reads the field first after it was written."""
        return self.readers[0].stage if self.readers else None


@dataclass
class Trace:
    """What is known about a key; `trajectory` is None while there is no token-level record, `why` says why not."""

    key: str
    uid: str
    prompt: PromptLife | None
    trajectory: Trajectory | None
    states: list[State]
    fields: list[FieldLife]
    group: list[Trajectory] = field(default_factory=list)
    why: str | None = None


def trace_key(run: RunFolder, key: str) -> Trace:
    """The life of a trajectory, or of a whole group when `key` is a uid.

    Raises:
        RunFolderError: the run knows no such key; names near ones.
    """
    journal = run.journal()
    uid, session = split_key(key)
    life = journal.prompt(key) or journal.prompt(uid)
    if life is not None and life.uid == key:
        uid, session = key, None
    group, declared_step = _group(run, journal, life, uid)
    if life is None and not group:
        raise _unknown(run, journal, key)
    chosen = next((row for row in group if row.key == key), None)
    if session is not None and chosen is None:
        _refuse_absent(key, life, group, session)
    rows = [chosen] if chosen else group
    step = chosen.step if chosen else declared_step
    return Trace(
        key=key,
        uid=uid,
        prompt=life,
        trajectory=chosen,
        states=states_of(journal, life, chosen, step),
        fields=fields_of(journal, rows[0], step) if rows else [],
        group=group,
        why=None if group else _why_no_record(life),
    )


def split_key(key: str) -> tuple[str, int | None]:
    """(uid, session) of a trajectory key; (key, None) for anything else."""
    parts = key.rsplit("_", 2)
    if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal():
        return parts[0], int(parts[1])
    return key, None


def _group(run: RunFolder, journal: Journal, life: PromptLife | None, uid: str) -> tuple[list[Trajectory], int | None]:
    """All records of a uid and the step they belong to."""
    step = None
    if life is not None:
        step = life.outcome_step if life.outcome_step is not None else life.step
        rows = [row for row in run.trajectories(step, life.partition) if row.uid == uid]
        if rows:
            return rows, step
    # Not where the journal says, or the journal says nothing: look everywhere, the newest first.
    for file in reversed(run.trajectory_files()):
        if life is not None and (file.partition != life.partition or file.step == step):
            continue
        rows = [row for row in run.trajectories(file.step, file.partition) if row.uid == uid]
        if rows:
            return rows, file.step
    return [], step


def states_of(journal: Journal, life: PromptLife | None, row: Trajectory | None, step: int | None) -> list[State]:
    """What happened, in order of time."""
    states = []
    if life is not None:
        again = f", issued {life.times_issued} times" if life.times_issued > 1 else ""
        weights = "" if life.version is None else f", weights {life.version}"
        states.append(State("issued", life.issued, note=f"step {life.step}, {life.sessions} sessions{weights}{again}"))
        if life.finished is not None:
            failed = f", {life.sessions_failed} sessions failed" if life.sessions_failed else ""
            reason = f": {life.reason}" if life.reason and life.outcome != "dropped" else ""
            states.append(State("finished", life.finished, note=f"the whole group, {life.status}{failed}{reason}"))
        if life.outcome == "trained":
            states.append(State("trained", life.ended or 0.0, note=f"into weights {life.outcome_version}"))
        elif life.outcome == "dropped":
            states.append(State("dropped", life.ended or 0.0, note=life.reason or ""))
    if row is not None and row.started is not None:
        turns = "" if row.num_turns is None else f", {row.num_turns} turns"
        note = f"on {row.worker or 'a worker'}, {len(row.response_ids)} response tokens{turns}"
        states.append(State("session", row.started, row.ended, note))
    partition = row.partition if row else life.partition if life else "train"
    trained_or_recorded = row is not None or (life is not None and life.outcome == "trained")
    if step is not None and partition == "train" and trained_or_recorded:
        states.extend(_states_of_step(journal, step, life.ended if life else None))
    return sorted(states, key=lambda state: (state.start, state.name != "issued"))


def _states_of_step(journal: Journal, step: int, ended: float | None) -> list[State]:
    states = []
    spans = journal.spans_of(step)
    for span in spans:
        if span.stage == "gen":
            states.append(State("sampled", span.end, note=f"into the batch of step {step}"))
        elif span.stage not in NOT_OF_ROWS:
            version = "" if span.version is None else f", weights {span.version}"
            writes = f", writes {', '.join(span.writes)}" if span.writes else ""
            states.append(State(span.stage, span.start, span.end, f"{span.rows} rows{version}{writes}"))
    # The journal has no line for it: a step's rows leave the queue at its end, before anything else happens.
    last = max([span.end for span in spans] + ([ended] if ended else []), default=None)
    if last is not None and (journal.last_step > step or journal.end is not None):
        states.append(State("cleared", last, note="with the step's other rows, at its end"))
    return states


def fields_of(journal: Journal, row: Trajectory, step: int | None) -> list[FieldLife]:
    """The fields of a record in the order in which they were written, each with its readers."""
    readers = readers_by_field(journal, step if row.partition == "train" else None)
    lives = [
        FieldLife(name, item.writer, item.time, item.version, _after(readers.get(name, ()), item.time))
        for name, item in row.lineage.items()
    ]
    return sorted(lives, key=lambda life: (life.time is None, life.time or 0.0))


def readers_by_field(journal: Journal, step: int | None) -> dict[str, tuple[Read, ...]]:
    """Field -> the stages that read it, in the order of a step; with times where the journal has the stage."""
    spans = {span.stage: span for span in journal.spans_of(step)} if step is not None else {}
    found: dict[str, list[Read]] = {}
    for declared in journal.stages:
        span = spans.pop(declared.stage, None)
        # Once the stage ran, what it really read counts; before that, what it says it will.
        really = set(span.reads) if span is not None and span.reads else None
        for name in (*declared.reads, *declared.optional_reads):
            if really is None or name in really:
                optional = really is None and name in declared.optional_reads
                found.setdefault(name, []).append(Read(declared.stage, span.start if span else None, optional))
    for span in spans.values():
        for name in span.reads:
            found.setdefault(name, []).append(Read(span.stage, span.start))
    return {name: tuple(reads) for name, reads in found.items()}


def _after(reads: tuple[Read, ...] | list[Read], written: float | None) -> tuple[Read, ...]:
    return tuple(read for read in reads if written is None or read.time is None or read.time >= written)


def _refuse_absent(key: str, life: PromptLife | None, group: list[Trajectory], session: int) -> None:
    """A key that cannot be, although its uid is known."""
    if group:
        names = ", ".join(row.key for row in group[:8]) + (", ..." if len(group) > 8 else "")
        hint = ""
        if life is not None and life.sessions_failed:
            hint = f" ({life.sessions_failed} of its sessions failed{': ' + life.reason if life.reason else ''})"
        raise RunFolderError(visible(f"no trajectory {key}{hint}; its group has {names}"))
    if life is not None and session >= life.sessions:
        raise RunFolderError(
            visible(
                f"no trajectory {key}: {life.uid} has {life.sessions} sessions, numbered from 0; try {life.uid}_0_0"
            )
        )


def _why_no_record(life: PromptLife | None) -> str:
    state = life.state if life else "unknown"
    if state == "running":
        return "its sessions are still running; token-level records are written when their step is trained"
    if state == "finished":
        return "its sessions are over; token-level records are written when their step is trained"
    if state == "dropped":
        return "a dropped prompt leaves no token-level record"
    return (
        "it was trained, but the step's file of token-level records does not hold it; "
        "trainer.trace.trajectories_per_step says how many rows of a step are recorded (null: all)"
    )


def _unknown(run: RunFolder, journal: Journal, key: str) -> RunFolderError:
    known = {uid for _, uid in journal.prompts}
    for file in run.trajectory_files():
        known.update(row.key for row in run.trajectories(file.step, file.partition))
    near = difflib.get_close_matches(key, sorted(known), n=3, cutoff=0.6)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif known:
        hint = f"a key is {{uid}}_{{session}}_{{index}}, for instance {_example(known)}"
    else:
        hint = "the run has issued no prompt yet"
    return RunFolderError(visible(f"{run.path} knows no key or uid {key!r}; {hint}"))


def _example(known: set[str]) -> str:
    return min(known, key=lambda name: (split_key(name)[1] is None, name))


def trace_to_json(trace: Trace) -> dict[str, Any]:
    """Plain data for `--json`: the names of the record, plus `states`, `fields` and `group`."""
    row = trace.trajectory
    life = trace.prompt
    return {
        "key": trace.key,
        "uid": trace.uid,
        "prompt": None if life is None else {**vars(life), "state": life.state},
        "states": [vars(state) for state in trace.states],
        "fields": [
            {**vars(item), "readers": [vars(read) for read in item.readers], "next_reader": item.next_reader}
            for item in trace.fields
        ],
        "trajectory": None if row is None else _trajectory_to_json(row),
        "group": [
            {
                "key": sibling.key,
                "reward": sibling.reward,
                "advantage": sibling.advantage,
                "invalid": sibling.invalid,
                "response_tokens": len(sibling.response_ids),
                "stop_reason": sibling.stop_reason,
            }
            for sibling in trace.group
        ],
        "why_no_record": trace.why,
    }


def _trajectory_to_json(row: Trajectory) -> dict[str, Any]:
    plain = {name: value for name, value in vars(row).items() if name not in ("series", "lineage")}
    return {**plain, **row.series, "advantage": row.advantage, "lineage": {n: vars(v) for n, v in row.lineage.items()}}
