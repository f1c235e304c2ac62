"""Names of a module without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.utils.source_names import find_source, read_names

SOURCE = """
raise SystemExit("must not run")
import numpy as np
from a.b import C, d as e
class Loop: pass
async def score(): pass
if True:
    def inside(): pass
else:
    other = 3
try:
    import torch
except ImportError:
    torch = None
@register("my_loop")
class Named: pass
@registry.register(name="second")
def function(): pass
"""


def test_names_of_every_kind_are_found(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(SOURCE)
    names = read_names(tmp_path / "m.py")
    assert names.classes == {"Loop", "Named"}
    assert names.functions == {"score", "inside", "function"}
    assert {"np", "C", "e", "other", "torch"} <= names.others
    assert names.registered == {"my_loop", "second"}
    assert "Loop" in names and "np" in names and "missing" not in names


@pytest.mark.parametrize("text", ["from x import *", "def __getattr__(name): ...", "globals()['a'] = 1"])
def test_a_module_that_makes_names_at_run_time_may_have_any(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.py").write_text(text)
    assert "anything" in read_names(tmp_path / "m.py")


def test_sources_of_dotted_names_are_found_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "unimported_pkg" / "sub"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py", package / "mod.py"):
        file.write_text("raise SystemExit('must not run')")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_source("unimported_pkg") == package.parent / "__init__.py"
    assert find_source("unimported_pkg.sub") == package / "__init__.py"
    assert find_source("unimported_pkg.sub.mod") == package / "mod.py"
    assert find_source("_json") is None and find_source("sys") is None
    for missing in ("no_such_pkg.x", "unimported_pkg.nothing", "unimported_pkg.sub.nothing"):
        with pytest.raises(ModuleNotFoundError):
            find_source(missing)
