"""Reading the pages: fenced blocks, inline code, tables, and the names that the pages document."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.observe import glossary

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("examples/**/*.md")])
_FENCE = re.compile(r"^(?P<fence>```+)(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=fence)[ ]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is that of its first line in the page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(*languages: str, pages: Iterable[Path] = PAGES) -> list[Block]:
    found = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            if match["language"] in languages:
                line = text.count("\n", 0, match.start("text")) + 1
                found.append(Block(page, line, match["language"], match["text"]))
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def inline_code(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


def table_rows(page: Path) -> Iterator[list[str]]:
    """Cells of the rows of all tables, without headings."""
    lines = prose(page).splitlines()
    for number, line in enumerate(lines):
        ruled = number + 1 < len(lines) and re.fullmatch(r"\|[-:|]+\|", lines[number + 1].strip())
        if line.startswith("|") and not ruled and not re.fullmatch(r"\|[-:|]+\|", line.strip()):
            yield [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


# --- shell ------------------------------------------------------------------------------------------------------------


def commands(block: Block) -> list[list[str]]:
    """The commands of a shell block as words; comments are gone, continued lines joined."""
    lines = block.text.replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        words = shlex.split(line, comments=True)
        current: list[str] = []
        for word in words:
            if word in ("&&", "||", "|", ";"):
                found.append(current)
                current = []
            else:
                current.append(word)
        found.append(current)
    return [words for words in found if words]


# --- metrics and events -----------------------------------------------------------------------------------------------


def undocumented_metrics(names: Iterable[str]) -> list[str]:
    """Those of the names that the glossary (docs/metrics.md) does not explain."""
    return sorted({name for name in names if glossary.find(name) is None})


def documented_events() -> dict[str, set[str]]:
    """Event -> its fields, from the table of run_folder.md."""
    text = (DOCS / "run_folder.md").read_text(encoding="utf-8")
    section = text.split("## events.jsonl")[1].split("\n## ")[0]
    events: dict[str, set[str]] = {}
    for line in section.splitlines():
        cells = line.split("|")[1:-1]
        if len(cells) == 2 and "`" in cells[0]:
            for event in re.findall(r"`([^`]+)`", cells[0]):
                events[event] = set(re.findall(r"`([^`]+)`", cells[1]))
    return events


def undocumented_facts(events: Iterable[dict[str, Any]]) -> list[str]:
    """`event` or `event.field` of journal lines that run_folder.md does not name."""
    known = documented_events()
    found = set()
    for event in events:
        name = event["event"]
        if name not in known:
            found.add(name)
            continue
        found |= {f"{name}.{field}" for field in set(event) - {"event", "time", "step"} - known[name]}
    return sorted(found)
