"""What `transfer_queue.py` says: the table of what was measured and which goals are met."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

Samples = dict[tuple[str, str], dict[str, list[float]]]  # (side, work) -> {figure: seconds}

JAGGED_ROWS = 4096


def say(text: str = "") -> None:
    """One line of the report."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Line(NamedTuple):
    """One line of the table: a figure of both sides, and of the yardstick for it."""

    text: str
    work: str
    figure: str
    yardstick: str | None = None
    public: str | None = None  # the public package's figure; None: of the same name
    ray: str | None = None


LINES = [
    Line("134 MB: put", "large", "put", "memcpy", ray="ray_put"),
    Line("134 MB: get (views)", "large", "get", "memcpy", ray="ray_get"),
    Line("134 MB: get, every byte read", "large", "get_touch", "memcpy_touch"),
    Line("2 MB: put", "small", "put", "memcpy", ray="ray_put"),
    Line("2 MB: get (views)", "small", "get", "memcpy", ray="ray_get"),
    Line("2 MB: get, every byte read", "small", "get_touch", "memcpy_touch"),
    Line("jagged 4096 rows x 6: put", "jagged", "put", "memcpy", ray="ray_put"),
    Line("jagged 4096 rows x 6: get (views)", "jagged", "get", "memcpy", ray="ray_get"),
    Line("jagged: get, every byte read", "jagged", "get_touch", "memcpy_touch"),
    Line("tag of one key", "tag", "tag", "call"),
    Line("16384 tags of new rows, one put", "tags", "new"),
    Line("16384 tags of old rows, one put", "tags", "merge"),
    Line("list of 16384 keys", "tags", "list"),
    Line("wake, 100k other keys held", "wake", "wake", public="held.poll"),
    Line("wake, no other key", "wake", "wake_alone"),
    Line("wait for what is there, 100k held", "wake", "ready"),
    Line("wait for what is there, none held", "wake", "ready_alone"),
    Line("one column of twelve", "columns", "of_twelve"),
    Line("the same column alone", "columns", "alone"),
    Line("all twelve columns", "columns", "all"),
]
# The yardstick of a tag is the quicker of two kinds of an actor; see ours.py.
_YARDSTICK_WORK = {"large": "large.bytes", "small": "small.bytes", "jagged": "jagged.bytes", "tag": "tag.calls"}


class Goal(NamedTuple):
    """One goal of the table, what was measured beside it."""

    text: str
    value: float
    limit: float
    at_most: bool
    unit: str

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit


class Figures:
    """Medians and minima of the samples."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        calls = samples.get(("rlflow", "tag.calls"))
        if calls:
            calls["call"] = min(calls["plain"], calls["async"], key=statistics.median)

    def seconds(self, side: str, work: str, figure: str) -> list[float]:
        """All samples of a figure; empty when it was not measured."""
        return self._samples.get((side, work), {}).get(figure, [])

    def median(self, side: str, work: str, figure: str) -> float | None:
        """Median; None when it was not measured."""
        found = self.seconds(side, work, figure)
        return statistics.median(found) if found else None

    def goals(self) -> Iterator[Goal]:
        """Every goal whose figures were measured."""

        def ratio(text: str, over: Any, under: Any, limit: float, at_most: bool) -> Iterator[Goal]:
            high, low = self.median(*over), self.median(*under)
            if high is not None and low is not None:
                yield Goal(text, high / low, limit, at_most, "x")

        def milliseconds(text: str, of: Any, limit: float) -> Iterator[Goal]:
            value = self.median(*of)
            if value is not None:
                yield Goal(text, 1e3 * value, limit, True, " ms")

        for work, text, limits in (("large", "134 MB", (2, 1.8, 1.2, 4)), ("small", "2 MB", (10, 3, 10, 3))):
            for figure, (cost, gain) in {"put": limits[:2], "get": limits[2:]}.items():
                ours = ("rlflow", work, figure)
                yield from ratio(f"{text} {figure} / memcpy", ours, ("rlflow", f"{work}.bytes", "memcpy"), cost, True)
                yield from ratio(f"{text} {figure}: public / rlflow", ("public", work, figure), ours, gain, False)
        copy_s = self.median("rlflow", "jagged.bytes", "memcpy")
        for figure in ("put", "get"):
            ours = ("rlflow", "jagged", figure)
            yield from ratio(f"jagged {figure}: public / rlflow", ("public", "jagged", figure), ours, 5, False)
            took_s = self.median(*ours)
            if took_s is not None and copy_s is not None:
                yield Goal(f"jagged {figure} beyond the byte cost", 1e6 * (took_s - copy_s) / JAGGED_ROWS, 5, True,
                           " us a row")  # fmt: skip
        yield from ratio("tag of one key / bare actor call", ("rlflow", "tag", "tag"), ("rlflow", "tag.calls", "call"),
                         1.2, True)  # fmt: skip
        yield from milliseconds("16384 tags in one put", ("rlflow", "tags", "new"), 30)
        yield from milliseconds("wake after the last row, 100k other keys held", ("rlflow", "wake", "wake"), 5)
        for name in ("wake", "ready"):
            held, alone = ("rlflow", "wake", name), ("rlflow", "wake", f"{name}_alone")
            yield from ratio(f"{name}, 100k keys held / none", held, alone, 1.5, True)
        one, alone = ("rlflow", "columns", "of_twelve"), ("rlflow", "columns", "alone")
        yield from ratio("one column of twelve / the same column alone", one, alone, 1.2, True)


def _cell(values: list[float]) -> str:
    if not values:
        return f"{'-':>17}"
    return f"{1e3 * statistics.median(values):>8.2f} ({1e3 * min(values):.2f})".ljust(17)


def _ratio(over: float | None, under: float | None) -> str:
    return f"{over / under:>7.2f}x" if over is not None and under else f"{'-':>8}"


def say_table(figures: Figures) -> None:
    """Every line: median (minimum) in milliseconds, and ratios of medians."""
    say(f"{'median (minimum) in ms':<36} {'rlflow':^17} {'public':^17} {'yardstick':^17} {'ray put/get':^17} "
        f"{'/yard':>8} {'public/':>8}")  # fmt: skip
    for line in LINES:
        ours = figures.seconds("rlflow", line.work, line.figure)
        work, figure = (line.public or f"{line.work}.{line.figure}").rsplit(".", 1)
        public = figures.seconds("public", work, figure)
        yard_work = _YARDSTICK_WORK.get(line.work, "")
        yard = figures.seconds("rlflow", yard_work, line.yardstick) if line.yardstick else []
        through_ray = figures.seconds("rlflow", yard_work, line.ray) if line.ray else []
        if not ours and not public:
            continue
        middle = [statistics.median(values) if values else None for values in (ours, public, yard)]
        say(f"{line.text:<36} {_cell(ours)} {_cell(public)} {_cell(yard)} {_cell(through_ray)} "
            f"{_ratio(middle[0], middle[2])} {_ratio(middle[1], middle[0])}")  # fmt: skip


def say_goals(figures: Figures) -> bool:
    """Every goal; False when one is missed."""
    all_met = True
    for goal in figures.goals():
        sign = "<=" if goal.at_most else ">="
        text = f"{goal.value:.2f}{goal.unit} (goal {sign} {goal.limit:g}{goal.unit})"
        say(f"{'met   ' if goal.met else 'MISSED'} {goal.text}: {text}")
        all_met = all_met and goal.met
    return all_met
