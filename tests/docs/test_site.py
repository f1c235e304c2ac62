"""The site builds, and what its pages tell a reader to type, import or set is there."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TOP = ("data", "trainer", "algorithm", "reward", "critic", "actor_rollout_ref", "transfer_queue", "ray_kwargs")
SHORT = ("actor", "rollout", "ref", "model")
# Programs that are not ours.
PROGRAMS = {"pip", "git", "cd", "ray", "uv", "mkdocs", "pre-commit", "ls", "cat", "export"}


# --- structure --------------------------------------------------------------------------------------------------------


def nav_pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    return [page for value in values for page in nav_pages(value)]


def test_the_navigation_has_every_page_once() -> None:
    pages = nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(pages) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("start", ["README.md", "docs/index.md"])
def test_every_page_is_one_click_away(start: str) -> None:
    text = (ROOT / start).read_text()
    assert [path.name for path in DOCS.glob("*.md") if f"{path.name})" not in text and path.name != "index.md"] == []


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="the extra docs is not installed")
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "one_step_explained" / "index.html").read_text()
    assert "<td><code>old_log_probs</code></td>" in page
    loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?://[^\" >]+)", page)
    assert [url for url in loaded if "squidfunk" not in url] == []


def anchor(heading: str) -> str:
    """As mkdocs and forges make it."""
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower()).strip())


def test_links_between_pages_lead_somewhere(pages: ModuleType) -> None:
    broken = []
    for page in pages.PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", pages.prose(page)):
            if target.startswith(("http://", "https://", "mailto:")):
                continue
            name, _, section = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            if not file.exists() or not file.is_relative_to(ROOT):
                broken.append(f"{page.name}: {target}")
            elif section and section not in map(anchor, re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)):
                broken.append(f"{page.name}: {target} (no such heading)")
    assert not broken


def test_paths_in_the_text_exist(pages: ModuleType) -> None:
    """`rlflow/x.py`, `examples/y/`, `tests/z`, `scripts/w` in backticks."""
    missing = []
    for page in pages.PAGES:
        for text in pages.inline_code(page):
            name = text.split("::")[0].rstrip("/")
            named = re.fullmatch(r"\.?/?((rlflow|examples|tests|scripts|docs|requirements|benchmarks)/[\w./-]+)", name)
            if named and not (ROOT / named[1]).exists():
                missing.append(f"{page.name}: {text}")
    assert not missing


def test_modules_in_the_text_exist(pages: ModuleType) -> None:
    missing = []
    for page in pages.PAGES:
        for text in pages.inline_code(page):
            if not re.fullmatch(r"rlflow(\.\w+)+", text) or Path(text).suffix in (".toml", ".yml"):
                continue
            parts = text.split(".")
            for end in range(len(parts), 0, -1):
                if _module_exists(".".join(parts[:end])):
                    break
            rest = parts[end:]
            if len(rest) > 1 or (rest and not hasattr(importlib.import_module(".".join(parts[:end])), rest[0])):
                missing.append(f"{page.name}: {text}")
    assert not missing


def _module_exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def is_key() -> Callable[[str], bool]:
    """Whether a key exists, or lies below a node that takes any (`engine_kwargs.hf: {}`)."""
    from omegaconf import OmegaConf

    from rlflow.config.overrides import compose_config

    config = compose_config()

    def exists(key: str) -> bool:
        node, rest = config, key.split(".")
        while rest:
            if node == {}:
                return True
            if not OmegaConf.is_dict(node) or rest[0] not in node.keys():  # noqa: SIM118 - `in` skips unset values
                return False
            node, rest = node._get_node(rest[0]), rest[1:]
        return True

    return exists


def overrides_of(words: list[str]) -> list[str]:
    """The `key=value` words of a command, as the shell would hand them on."""
    return [os.path.expandvars(word) for word in words if re.match(r"[+~]?[a-z_]+(\.[A-Za-z_]\w*)+=", word)]


def test_commands_set_keys_that_exist_to_values_that_parse(pages: ModuleType) -> None:
    from rlflow.config.overrides import compose_config
    from rlflow.utils.errors import ConfigError

    wrong = []
    checked = 0
    for block in pages.blocks("bash", "sh", "shell", "console"):
        for words in pages.commands(block):
            overrides = overrides_of(words)
            checked += len(overrides)
            if overrides:
                try:
                    compose_config(overrides)
                except ConfigError as error:
                    wrong.append(f"{block}: {error}")
    assert not wrong, "\n".join(wrong)
    assert checked > 20


def test_keys_in_the_text_exist(pages: ModuleType, is_key: Callable[[str], bool]) -> None:
    """`trainer.save_freq`, `actor.clip_ratio=0.3` and the like, outside command lines."""
    wrong = []
    for page in pages.PAGES:
        # The reference is made from the tree, and names keys from their node on.
        for text in () if page.name == "config_reference.md" else pages.inline_code(page):
            match = re.fullmatch(r"(\w+)((?:\.\w+)+)(=.*)?", text)
            if match is None or match[2] in (".pt", ".py", ".json", ".jsonl", ".yaml", ".md", ".load", ".pdf"):
                continue
            key = match[1] + match[2]
            if match[1] in SHORT:
                key = f"actor_rollout_ref.{key}"
            elif match[1] not in TOP:
                continue
            if not is_key(key):
                wrong.append(f"{page.name}: {text}")
    assert not wrong


# --- commands ---------------------------------------------------------------------------------------------------------


def options_of(words: list[str]) -> list[str]:
    return [word.split("=")[0] for word in words if re.match(r"--[a-z]", word)]


def test_commands_exist_and_know_their_options(pages: ModuleType) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wrong = []
    for block in pages.blocks("bash", "sh", "shell", "console"):
        for words in pages.commands(block):
            problem = problem_of(words, extras)
            if problem:
                wrong.append(f"{block}: {problem}: {' '.join(words)}")
    assert not wrong


def problem_of(words: list[str], extras: dict[str, Any]) -> str | None:
    """What is wrong with a command, None when nothing is."""
    while words and re.match(r"\w+=", words[0]):  # VARIABLE=value in front
        words = words[1:]
    if not words:
        return None
    first, rest = words[0], words[1:]
    if first == "bash":
        first, rest = rest[0], rest[1:]
        if (ROOT / first).is_file() and "rlflow.trainer.main_ppo" in (ROOT / first).read_text():
            return command_line_problem("rlflow.trainer.main_ppo", rest)
    if first in ("pip", "uv"):
        named = [extra for word in rest for group in re.findall(r"\[([\w,-]+)\]$", word) for extra in group.split(",")]
        return next((f"no extra {extra}" for extra in named if extra not in extras), None)
    if first in PROGRAMS:
        return None
    if first in ("python", "python3", "$python"):
        if rest[:1] == ["-m"] and rest[1].startswith("verl."):
            return None  # what a reader types today
        if rest[:1] == ["-m"]:
            source = importlib.util.find_spec(rest[1])
            if source is None or (source.submodule_search_locations and not _module_exists(f"{rest[1]}.__main__")):
                return f"no module {rest[1]}"
            return command_line_problem(rest[1], rest[2:])
        if rest[:1] == ["-c"]:
            compile(rest[1], "-c", "exec")
            return None
        first, rest = f"./{rest[0]}", rest[1:]
    if first == "rlflow":
        return command_line_problem("rlflow.cli", rest)
    script = ROOT / first
    if not script.is_file():
        return f"no program {first}"
    sources = script.read_text()
    for name in re.findall(r"(?:examples|scripts)/[\w/]+\.(?:py|sh)", sources):
        sources += (ROOT / name).read_text() if (ROOT / name).is_file() else ""
    if script.suffix == ".py" and (script.parent / "common.py").is_file():
        sources += (script.parent / "common.py").read_text()
    if first == "./test.sh":
        return None  # its options are pytest's
    return next((f"no option {option}" for option in options_of(rest) if option not in sources), None)


def command_line_problem(module: str, rest: list[str]) -> str | None:
    if module == "rlflow.trainer.main_ppo":
        return next(
            (f"no option {o}" for o in options_of(rest) if o not in ("--cfg", "--help", "--plan", "--json")), None
        )
    if module in ("rlflow.cli", "rlflow.model_merger"):
        command = next((word for word in rest if not word.startswith("-")), None)
        if module == "rlflow.model_merger":
            return parser_problem(_merger_help(command), rest)
        from rlflow.cli.main import available

        if command not in available():
            return f"no command {command}"
        from rlflow.cli.main import build_parser

        choices = build_parser(command)._subparsers._group_actions[0].choices  # type: ignore[union-attr, index]
        help_text = choices[command].format_help()
        for group in choices[command]._subparsers._group_actions if choices[command]._subparsers else ():
            help_text += "".join(verb.format_help() for verb in group.choices.values())
        return parser_problem(help_text, rest)
    return None


def _merger_help(command: str | None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rlflow.model_merger", *([command] if command else []), "--help"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    return done.stdout


def parser_problem(help_text: str, words: list[str]) -> str | None:
    known = set(re.findall(r"--[\w-]+", help_text))
    return next((f"no option {option}" for option in options_of(words) if option not in known), None)


# --- python -----------------------------------------------------------------------------------------------------------


def test_python_blocks_compile_and_import_what_exists(pages: ModuleType) -> None:
    wrong = []
    found = pages.blocks("python", "py")
    assert len(found) > 5
    for block in found:
        tree = ast.parse(block.text, filename=str(block))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlflow"):
                module = importlib.import_module(str(node.module))
                wrong += [f"{block}: {node.module} has no {a.name}" for a in node.names if not hasattr(module, a.name)]
    assert not wrong


def test_shell_blocks_are_shell(pages: ModuleType) -> None:
    bash = shutil.which("bash")
    for block in pages.blocks("bash"):
        text = block.text.replace("<this repository>", "REPO")
        done = subprocess.run([str(bash), "-n"], input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{block}: {done.stderr}"


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts_of_the_package() -> list[str]:
    """All strings of the package; the parts of an f-string one by one."""
    found = []
    for path in (ROOT / "rlflow").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_package(
    pages: ModuleType, texts_of_the_package: list[str]
) -> None:
    everything = "\0".join(texts_of_the_package)
    wrong, checked = [], 0
    for cells in pages.table_rows(DOCS / "troubleshooting.md"):
        for message in re.findall(r"^`([^`]+)`$", cells[0]):
            parts = [part for part in message.split("...") if len(part.strip(" .:;()=")) > 3]
            checked += 1
            if not parts or any(part not in everything for part in parts):
                wrong.append(message)
    assert not wrong
    assert checked > 20
