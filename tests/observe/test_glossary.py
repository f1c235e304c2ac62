"""The glossary has a line for every metric, and a metric for every line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from rlflow.observe import glossary
from rlflow.observe.glossary.entry import AS_NAMED, Entry
from rlflow.utils.metric import AggregationType

PACKAGE = Path(__file__).resolve().parents[2] / "rlflow"
STATISTICS = {"mean", "max", "min", "std"}
# Lines whose metric nothing in this version reports: the async trainer modes, and steps that replace failed prompts.
NOT_YET = {
    "training/off_policy/evicted_samples",
    "training/off_policy/evicted_samples_staleness/{mean,max,min}",
    "training/rollout_failure/evicted_samples",
}
# Families of parts that this version is without.
NOT_HERE = ("gdpo/", "remax/", "rollout_corr/", "training/filter_groups/")
# Strings of the code that look like metrics and are something else.
OTHER_STRINGS = {"actor/", "critic/", "actor/ref"}


@cache
def strings() -> frozenset[str]:
    """Every string of the package; the holes of f-strings are a NUL."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        if "glossary" not in file.parts:
            tree = ast.parse(file.read_text(encoding="utf-8"))
            documented = {id(text) for text in _docstrings(tree)}
            found |= {text for node in ast.walk(tree) if id(node) not in documented for text in _texts(node)}
    return frozenset(found)


def _docstrings(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            yield body[0].value


def _texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def families() -> set[str]:
    """First segments of the names, as far as they are fixed."""
    return {entry.name.split("/")[0] for entry in glossary.entries() if not re.match(r"[{<]", entry.name)}


def names_of(entry: Entry) -> list[str]:
    """The names an entry stands for; `<x>` stays."""
    names = [""]
    for part in re.split(r"(\{[^}]*\})", entry.name):
        choices = part[1:-1].split(",") if part.startswith("{") else [part]
        names = [name + choice for name in names for choice in choices]
    return names


@cache
def templates() -> tuple[re.Pattern[str], ...]:
    """Strings with holes that could be a part of a name; at least one word of them is fixed."""
    fixed = [text for text in strings() if "\0" in text and re.fullmatch(r"[\w\0/]+", text)]
    return tuple(re.compile(re.escape(t).replace("\0", ".*")) for t in fixed if re.search(r"[a-z]{3}", t))


def spoken(name: str) -> bool:
    """Whether some string of the code says the name or a tail of it, with or without the statistic that ends it.

    Names are put together from a prefix and a tail: `f"{prefix}/trajectory_spans"`, `spread("critic/score", ...)`.
    """
    family = re.sub(r"(/<[^>]*>)+$", "", name)
    if family != name and family in strings():
        return True
    name = re.sub(r"<[^>]*>", "x", name)
    for whole in {name, re.sub(r"[/_](mean|max|min|std)$", "", name)}:
        for start in {0, *(match.end() for match in re.finditer(r"[/_]", whole))}:
            tail = whole[start:]
            if tail in STATISTICS:
                continue
            if tail in strings() or any(template.fullmatch(tail) for template in templates()):
                return True
    return False


def test_every_line_is_a_metric_of_the_code() -> None:
    lines = [e for e in glossary.entries() if e.name not in NOT_YET and not e.name.startswith(NOT_HERE)]
    dead = [name for entry in lines for name in names_of(entry) if not spoken(name)]
    assert not dead, "the code reports none of these"


def test_the_exceptions_are_lines_of_the_glossary() -> None:
    assert {entry.name for entry in glossary.entries()} >= NOT_YET


def unexplained() -> list[str]:
    """Strings of the code that look like a metric of a known family and have no line."""
    named = [name for entry in glossary.entries() for name in names_of(entry)]
    unknown = []
    for text in strings() - OTHER_STRINGS:
        if not re.fullmatch(r"[a-z][\w\0]*(/[\w\0]+)+", text) or text.split("/")[0] not in families():
            continue
        example = text.replace("\0", "x")
        # The whole name, or what stands before `/mean` and the like; a hole may hide a fixed word of the glossary.
        hidden = re.compile(re.escape(text).replace("\0", ".+") + r"(?:[/_].*)?")
        # Workers report names without the role.
        known = glossary.find(example) or glossary.find(f"actor/{example}")
        if known is None and not any(hidden.fullmatch(name) for name in named):
            unknown.append(text.replace("\0", "{}"))
    return sorted(unknown)


def test_every_metric_of_the_code_has_a_line() -> None:
    assert unexplained() == [], "add a line to rlflow/observe/glossary"


def test_lines_are_found_by_whole_names_the_first_one_wins() -> None:
    assert glossary.find("critic/score/max").name == "critic/score/{mean,max,min}"
    assert glossary.find("critic/score/maximum") is None and glossary.find("my/critic/score/max") is None
    assert glossary.find("val-aux/num_turns/mean").unit == "messages"
    assert glossary.find("val-core/openai/gsm8k/acc/mean@16").name.startswith("val-core/<source>")
    assert glossary.find("timing_s/step").meaning != glossary.find("timing_s/gen").meaning
    named = [entry.name for entry in glossary.entries()]
    assert len(named) == len(set(named))
    shadowed = [
        name for entry in glossary.entries() for name in names_of(entry) if glossary.find(name).name != entry.name
    ]
    assert not shadowed, "an earlier line takes these names"


@pytest.mark.parametrize("entry", glossary.entries(), ids=lambda entry: entry.name)
def test_a_line_is_complete(entry: Entry) -> None:
    assert entry.meaning and not entry.meaning.endswith(".") and not entry.alarming.endswith(".")
    assert entry.combine in {*AggregationType, AS_NAMED}
    for name in names_of(entry):
        kind = glossary.reduction_of(name)
        AggregationType(kind)
        # A name that ends in a statistic combines by it.
        last = re.split(r"[/_]", name)[-1]
        if last in ("max", "min"):
            assert kind == last
