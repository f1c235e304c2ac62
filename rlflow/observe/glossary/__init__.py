"""The glossary of metrics: what each number means, its unit, how it combines, and when it is alarming.

One table in code, of which docs/metrics.md is generated (`python scripts/generate_docs.py`), and by which
`MetricsAggregator` combines plain numbers. Every metric a run logs has an entry, and no entry is without a metric;
tests hold both.

    find("actor/grad_norm").alarming    -> "jumps, or stays far above ..."
    reduction_of("my/reward_max")       -> "max"
"""

from __future__ import annotations

import re
from functools import lru_cache

from rlflow.observe.glossary.entry import AS_NAMED, LAST, MAX, MEAN, MIN, SUM, Entry
from rlflow.observe.glossary.learning import BASELINES, LEARNING, SAMPLING
from rlflow.observe.glossary.rollout import AGREEMENT, CORRECTION
from rlflow.observe.glossary.system import FAILURES, LENGTHS, TIME
from rlflow.observe.glossary.update import CRITIC, POLICY, VARIANCE

__all__ = ["SECTIONS", "Entry", "entries", "find", "reduction_of"]

# Name of the generated part of docs/metrics.md -> its lines.
SECTIONS: dict[str, tuple[Entry, ...]] = {
    "learning": LEARNING,
    "baselines": BASELINES,
    "sampling": SAMPLING,
    "policy": POLICY,
    "variance": VARIANCE,
    "critic": CRITIC,
    "agreement": AGREEMENT,
    "correction": CORRECTION,
    "lengths": LENGTHS,
    "failures": FAILURES,
    "time": TIME,
}
_LAST_WORDS = {"max": MAX, "min": MIN, "sum": SUM, "total": SUM, "lr": LAST}


def entries() -> list[Entry]:
    """All lines, in the order of the page."""
    return [entry for section in SECTIONS.values() for entry in section]


@lru_cache(maxsize=4096)
def find(name: str) -> Entry | None:
    """The first entry that stands for this metric; None for one that is not ours."""
    return next((entry for entry in entries() if entry.pattern.fullmatch(name)), None)


@lru_cache(maxsize=4096)
def reduction_of(name: str) -> str:
    """How plain values of this name combine: "mean", "sum", "min", "max" or "last".

    As its entry says; for statistics, and for names without an entry, by the last word: "domain" is no minimum.
    """
    entry = find(name)
    if entry is not None and entry.combine != AS_NAMED:
        return entry.combine
    return _LAST_WORDS.get(re.split(r"[/_]", name)[-1], MEAN)
