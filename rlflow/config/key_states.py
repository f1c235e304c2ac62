"""What becomes of a key that is set: it is honoured, or accepted without effect, or refused.

Invariant: a key of the tree that is set away from its default is read by the code, or gives one notice line (`inert`),
or ends the run before it starts (`unbuilt`); nothing is ignored in silence. Rules name keys by patterns: `*` stands for
one name, `**` for any number of names (also none). The first match counts; a key without a rule is honoured.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

HONOURED, INERT, UNBUILT = "honoured", "inert", "unbuilt"


@dataclass(frozen=True)
class Rule:
    """What becomes of the keys of one pattern.

    `why`: why an inert key has no meaning here, or the feature that an unbuilt one needs. `instead`: what to
    set or do in its place. `honoured_by`: rollout engines that do honour the keys.
    """

    pattern: str
    state: str
    why: str
    instead: str = ""
    honoured_by: tuple[str, ...] = ()


def inert(pattern: str, why: str, honoured_by: tuple[str, ...] = ()) -> Rule:
    """Accepted, without effect."""
    return Rule(pattern, INERT, why, honoured_by=honoured_by)


def unbuilt(pattern: str, feature: str, instead: str, honoured_by: tuple[str, ...] = ()) -> Rule:
    """Refused when it is set away from its default."""
    return Rule(pattern, UNBUILT, feature, instead, honoured_by)


def rule_for(key: str) -> Rule | None:
    """The rule of a dotted key; None when the key is honoured."""
    from rlflow.config.key_rules import RULES

    return next((rule for rule in RULES if matches(rule.pattern, key)), None)


def matches(pattern: str, key: str) -> bool:
    """Whether a dotted key fits a pattern."""
    return _compiled(pattern).fullmatch(f".{key}") is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = (r"(?:\.[^.]+)*" if name == "**" else rf"\.{_any_name(name)}" for name in pattern.split("."))
    return re.compile("".join(parts))


def _any_name(name: str) -> str:
    return re.escape(name).replace(r"\*", "[^.]*")
