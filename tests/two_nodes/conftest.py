"""The tiny run of tests/e2e, and an environment in which Ray clusters of a test stay out of the way of the others."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("e2e_fixtures", Path(__file__).parents[1] / "e2e" / "conftest.py")
assert _spec is not None and _spec.loader is not None
_e2e = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_e2e)
tiny_overrides = _e2e.tiny_overrides


@pytest.fixture
def cluster_environment() -> Iterator[dict[str, str]]:
    """Environment of a process that starts a Ray cluster of its own.

    Ray notes in its temporary folder which cluster was started last and connects other processes to it; the path of a
    socket in that folder has to stay short.
    """
    folder = tempfile.mkdtemp(prefix="rl2n")
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    env |= {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "RAY_TMPDIR": folder}
    yield env
    shutil.rmtree(folder, ignore_errors=True)
