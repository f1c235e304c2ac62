"""What the pages hold from the code is what the code says now."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from rlflow.config.yaml_text import documented
from rlflow.utils.import_utils import load_module

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return load_module(str(ROOT / "scripts" / "generate_docs.py"))


def test_generated_parts_are_up_to_date(generator: ModuleType) -> None:
    stale = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if generator.generate(text) != text:
            stale.append(page.name)
    assert not stale, f"{stale}: run python scripts/generate_docs.py"


def test_a_changed_part_is_noticed_and_the_rest_is_left_alone(generator: ModuleType) -> None:
    page = "before\n<!-- generated:live-table -->\nold\n<!-- /generated:live-table -->\nafter\n"
    made = generator.generate(page)
    assert made != page and "old" not in made
    assert made.startswith("before\n") and made.endswith("\nafter\n")
    assert generator.generate(made) == made
    with pytest.raises(ValueError, match="no part 'nothing'"):
        generator.generate("<!-- generated:nothing -->\n<!-- /generated:nothing -->")


def test_every_key_of_the_reference_has_a_description(generator: ModuleType) -> None:
    rows = [line for line in generator.config_reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    # A node that a group file is mounted on has its comment in that file.
    bare = [row for row in rows if row.split("|")[3].strip() == "" and row.split("|")[2].strip() != ""]
    assert not bare


def test_later_files_and_nested_keys_get_their_own_comment(tmp_path: Path) -> None:
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / "a.yaml").write_text("# First.\nx: 1\n\n# A node.\nn:\n\n  # Inner.\n  y: 2\n")
    (tmp_path / "main.yaml").write_text("defaults:\n  - group@top: a\n\ntop:\n\n  # Second.\n  x: 3\n")
    comments = {key: place.comment for key, place in documented("main.yaml", tmp_path).items()}
    assert comments == {"defaults": "", "top": "", "top.x": "Second.", "top.n": "A node.", "top.n.y": "Inner."}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("${oc.select:data.max_prompt_length,512}", "that of `data.max_prompt_length`"),
        ("${.save_contents}", "that of `actor.checkpoint.save_contents`"),
        ("???", "must be set"),
        (None, "`null`"),
        (["a", 1], "`[a, 1]`"),
        ({}, "`{}`"),
    ],
)
def test_defaults_are_shown_as_a_reader_understands_them(generator: ModuleType, value: object, shown: str) -> None:
    assert generator.default_cell(value, "actor", "checkpoint.load_contents") == shown
