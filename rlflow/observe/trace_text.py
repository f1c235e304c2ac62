"""A trace for a terminal, narrow ones too: facts, states, fields, group, tokens."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rlflow.observe.records import SERIES, Trajectory
from rlflow.observe.trace import Read, Trace
from rlflow.observe.visible import shorten, visible

# Width in columns from which a column of the token table is shown.
TOKEN_COLUMNS = (
    ("rollout", "rollout_log_probs", 60),
    ("old", "old_log_probs", 40),
    ("ref", "ref_log_prob", 72),
    ("old-roll", None, 60),
    ("entropy", "entropy", 84),
    ("value", "values", 92),
    ("adv", "advantages", 40),
    ("return", "returns", 100),
)


def render_trace(trace: Trace, console: Console, *, tokens: bool = True) -> None:
    """Print the trace."""
    width = console.width
    wide = width >= 72
    console.print(_facts(trace))
    console.print(_section("states", _states(trace, wide)))
    if trace.fields:
        console.print(_section("fields, as they were written", _fields(trace, wide)))
    if trace.group:
        console.print(_section(f"group of {visible(trace.uid)}", _siblings(trace, width, wide)))
    row = trace.trajectory
    if row is not None:
        console.print(_section("prompt", Text(visible(row.prompt_text, newlines=True))))
        console.print(_section("response", _response(row)))
        if tokens:
            console.print(_section("tokens", _tokens(row, width)))
    elif trace.group:
        console.print(_section("prompt", Text(visible(trace.group[0].prompt_text, newlines=True))))
    if trace.why:
        console.print(Text(f"no token-level record: {trace.why}", style="yellow"))


def _section(title: str, body: RenderableType) -> Group:
    return Group(Text(f"\n{title}", style="bold"), Padding(body, (0, 0, 0, 2)))


def _facts(trace: Trace) -> Text:
    row, life = trace.trajectory, trace.prompt
    text = Text(visible(trace.key), style="bold cyan")
    parts = []
    if life is not None:
        parts.append(life.state if life.partition == "train" else f"{life.partition}, {life.state}")
        parts.append(f"step {life.outcome_step if life.outcome_step is not None else life.step}")
    elif row is not None:
        parts += [row.partition, f"step {row.step}"]
    if row is not None:
        parts.append("reward invalid" if row.invalid else f"reward {_number(row.reward)}")
        if row.advantage is not None:
            parts.append(f"advantage {_number(row.advantage)}")
        parts.append(f"{len(row.prompt_ids)} + {len(row.response_ids)} tokens")
        if row.stop_reason:
            parts.append(f"stopped by {visible(row.stop_reason)}")
        if row.min_version is not None:
            same = row.min_version == row.max_version
            parts.append(f"weights {row.min_version}" if same else f"weights {row.min_version} to {row.max_version}")
    text.append("  " + ", ".join(parts), style="default")
    if row is not None:
        for name, value in (("source", row.data_source), ("truth", row.ground_truth), ("invalid", row.invalid)):
            if value is not None:
                text.append(f"\n  {name}: ", style="dim")
                text.append(shorten(visible(value), 400), style="red" if name == "invalid" else "default")
        if row.reward_extra_info:
            shown = ", ".join(f"{visible(k)}={visible(v)}" for k, v in row.reward_extra_info.items())
            text.append("\n  scorer: ", style="dim")
            text.append(shorten(shown, 400), style="default")
    return text


def _table(*headers: str, right: Iterable[str] = ()) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    for header in headers:
        table.add_column(header, justify="right" if header in right else "left", overflow="fold")
    return table


def _states(trace: Trace, wide: bool) -> Table:
    first = trace.states[0].start if trace.states else 0.0
    if wide:
        table = _table("time", "after", "took", "state", "", right=("after", "took"))
    else:
        table = _table("after", "state", "", right=("after",))
    for state in trace.states:
        took = "" if state.end is None else _seconds(state.end - state.start)
        after = _seconds(state.start - first)
        note = Text(visible(state.note))
        name = Text(visible(state.name), style=_STATE_STYLES.get(state.name, "green"))
        table.add_row(*((_clock(state.start), after, took, name, note) if wide else (after, name, note)))
    return table


_STATE_STYLES = {"issued": "cyan", "session": "cyan", "finished": "cyan", "dropped": "red", "cleared": "dim"}


def _fields(trace: Trace, wide: bool) -> RenderableType:
    if wide:
        table = _table("field", "written by", "time", "weights", "read next by", right=("weights",))
    else:
        table = _table("field", "written by", "read next by")
    # Fields that travel along for the record would bury the ones a step works on.
    rest = [item for item in trace.fields if not item.readers and item.name not in SERIES]
    for item in (item for item in trace.fields if item not in rest):
        readers = Text(", ".join(_read(read) for read in item.readers) or "nobody", style="" if item.readers else "dim")
        name, writer = Text(visible(item.name)), Text(visible(item.writer))
        version = "" if item.version is None else str(item.version)
        when = "" if item.time is None else _clock(item.time)
        table.add_row(*((name, writer, when, version, readers) if wide else (name, writer, readers)))
    names = ", ".join(visible(item.name) for item in rest)
    return Group(table, Text(f"and {names}, which no stage reads", style="dim")) if rest else table


def _read(read: Read) -> str:
    return f"{visible(read.stage)} (if there)" if read.optional else visible(read.stage)


def _siblings(trace: Trace, width: int, wide: bool) -> Table:
    table = _table("key", "reward", "adv", "tokens", right=("reward", "adv", "tokens"))
    for column in table.columns:
        column.no_wrap = wide
    if wide:
        table.add_column("stop", overflow="fold", max_width=10)
        table.add_column("response", no_wrap=True)
    # Cut here: rich would rather squeeze the other columns than cut a long cell.
    longest = max((len(visible(row.key)) for row in trace.group), default=0)
    room = max(8, width - longest - 44)
    for row in trace.group:
        here = row.key == trace.key
        cells: list[RenderableType] = [
            Text(("> " if here else "  ") + visible(row.key), style="bold" if here else ""),
            "invalid" if row.invalid else _number(row.reward),
            _number(row.advantage),
            str(len(row.response_ids)),
        ]
        if wide:
            cells += [Text(visible(row.stop_reason or "")), Text(shorten(visible(row.response_text), room))]
        table.add_row(*cells)
    return table


def _response(row: Trajectory) -> Text:
    """The response as its tokens; those the loss leaves out are dim and struck through."""
    text = Text()
    for position, token in enumerate(row.response_tokens):
        masked = position < len(row.response_mask) and not row.response_mask[position]
        text.append(visible(token, newlines=True), style="dim strike" if masked else "")
    return text if row.response_tokens else Text(visible(row.response_text, newlines=True))


def _tokens(row: Trajectory, width: int) -> Table:
    columns = [(title, name) for title, name, least in TOKEN_COLUMNS if width >= least and _has(row, name)]
    titles = [title for title, _ in columns]
    rewarded = [position for position, value in enumerate(row.series.get("rm_scores", [])) if value]
    if rewarded and width >= 66:
        titles.append("reward")
    table = _table("#", "token", "mask", *titles, right=("#", *titles))
    for position in range(len(row.response_ids)):
        token = (
            row.response_tokens[position] if position < len(row.response_tokens) else str(row.response_ids[position])
        )
        mask = row.response_mask[position] if position < len(row.response_mask) else 1
        cells = [_number(value_at(row, name, position), 3) for _, name in columns]
        if titles[-1:] == ["reward"]:
            cells.append(_number(row.series["rm_scores"][position], 3) if position in rewarded else "")
        # A token that is no character by itself (a part of one) decodes to nothing.
        shown = Text(shorten(visible(token) or "∅", max(6, width // 5)), style="" if mask else "dim")
        table.add_row(str(position), shown, "1" if mask else "0", *cells)
    return table


def _has(row: Trajectory, name: str | None) -> bool:
    if name is None:
        return "old_log_probs" in row.series and "rollout_log_probs" in row.series
    return name in row.series


def value_at(row: Trajectory, name: str | None, position: int) -> float | None:
    """A number of a response token; name None: old minus rollout log-prob."""
    if name is None:
        old, rollout = value_at(row, "old_log_probs", position), value_at(row, "rollout_log_probs", position)
        return None if old is None or rollout is None else old - rollout
    values = row.series.get(name, [])
    return values[position] if position < len(values) else None


def _number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return "-"
    if value != 0 and abs(value) < 10**-digits:
        return f"{value:.0e}"
    return f"{value:.{digits}f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if abs(seconds) < 60 else f"{seconds / 60:.1f} min"


def _clock(seconds: float) -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return time.strftime("%H:%M:%S", time.localtime(whole)) + f".{thousandths:03d}"
