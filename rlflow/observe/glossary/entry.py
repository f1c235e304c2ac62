"""What is known about a metric."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

# How plain values of one name combine, over the iterations of a step. A `Metric` carries its own rule.
MEAN, SUM, MIN, MAX, LAST = "mean", "sum", "min", "max", "last"
# By the statistic that ends the name: `.../max` is the largest of the maxima.
AS_NAMED = "as named"


@dataclass(frozen=True)
class Entry:
    """A line of the glossary.

    Fields:
        name: the metric; `{a,b}` stands for several names, `<x>` for something that depends on the run.
        meaning: one phrase.
        unit: "" for a pure number.
        combine: how values of the iterations of a step combine: one of the constants above.
        alarming: when to look closer; "" when the number by itself says nothing.
    """

    name: str
    meaning: str
    unit: str = ""
    combine: str = MEAN
    alarming: str = ""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the names that the entry stands for."""
        parts = re.split(r"(<[^>]+>|\{[^}]*\})", self.name)
        return re.compile("".join(_expression(part) for part in parts))


def _expression(part: str) -> str:
    if part.startswith("<"):
        return ".+"
    if part.startswith("{"):
        return "(?:" + "|".join(map(re.escape, part[1:-1].split(","))) + ")"
    return re.escape(part)
