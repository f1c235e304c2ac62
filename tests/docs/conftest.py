"""The pages as fixtures: tests cannot import a module that lies beside them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from rlflow.utils.import_utils import load_module

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def pages() -> ModuleType:
    return load_module(str(ROOT / "tests" / "docs" / "pages.py"))
