"""What stands in the YAML files around a key: the comment above it, the file and the line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
_KEY = re.compile(r"[\w-]+(?=:)")


@dataclass(frozen=True)
class Place:
    """One key of one file: its comment, and where it is ("actor/actor.yaml:12")."""

    comment: str
    where: str


def documented(file: str, folder: Path = FOLDER, model_engine: str = "dp") -> dict[str, Place]:
    """Full key -> its place, over the file and the groups of its defaults list; later files win.

    Args:
        file: a config file with a defaults list, below `folder`.
        folder: where the group folders are.
        model_engine: the choice of that group, which names further files.
    """
    found: dict[str, Place] = {}
    for path, mount in mounted(folder, file, "", model_engine):
        for key, comment, line in comments_of(path):
            name = str(path.relative_to(folder.resolve()))
            full = f"{mount}.{key}".lstrip(".")
            if comment or full not in found:
                found[full] = Place(comment, f"{name}:{line}")
    return found


def mounted(folder: Path, file: str, mount: str, model_engine: str = "dp") -> Iterator[tuple[Path, str]]:
    """(YAML file, where its keys are put) in the order in which Hydra merges them."""
    import yaml

    path = (folder / file).resolve()
    text = path.read_text(encoding="utf-8")
    # Only the defaults list matters here, and parsing whole files would take a second for the tree.
    head = re.search(r"^defaults:\n(?:[ ]+- .*\n|\n|#.*\n)*", text, re.MULTILINE)
    defaults = yaml.safe_load(head[0])["defaults"] if head else ["_self_"]
    if "_self_" not in defaults:
        defaults = [*defaults, "_self_"]
    for entry in defaults:
        if entry == "_self_":
            yield path, mount
            continue
        group, name = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
        if group.startswith("override "):
            continue
        group, _, package = group.partition("@")
        name = name.replace("${model_engine}", model_engine)
        if group == "model_engine":
            continue
        yield from mounted(path.parent / group, f"{name}.yaml", f"{mount}.{package}".strip("."), model_engine)


def comments_of(path: Path) -> Iterator[tuple[str, str, int]]:
    """(key path, comment above it, line number) of one YAML file."""
    stack: list[tuple[int, str]] = []
    comment: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        key = _KEY.match(text)
        if text.startswith("#"):
            comment.append(text.lstrip("# "))
        elif key:
            indent = len(line) - len(line.lstrip())
            stack = [item for item in stack if item[0] < indent] + [(indent, key[0])]
            yield ".".join(name for _, name in stack), " ".join(comment), number
            comment = []
        else:
            comment = []
