"""Rows cross from one Ray node to another, and a lost unit of one node leaves the rows of the other.

The cluster of two raylets has a process of its own, since this one is connected to the cluster of the other tests.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlflow.utils.import_utils import load_module

pytestmark = pytest.mark.alone

SCRIPT = Path(__file__).with_name("two_nodes.py")
SCENARIOS = [name for name in vars(load_module(str(SCRIPT)).Scenarios) if not name.startswith("_")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    results = tmp_path_factory.mktemp("two_nodes") / "results.json"
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1"}
    env.pop("RAY_ADDRESS", None)
    # Ray notes in its temporary folder which cluster was started last, and connects other processes to it. The path of
    # a socket in that folder has to stay short.
    env["RAY_TMPDIR"] = folder = tempfile.mkdtemp(prefix="tq2n")
    process = subprocess.Popen([sys.executable, str(SCRIPT), str(results)], env=env, start_new_session=True)
    try:
        code = process.wait(150)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)
    assert code == 0
    return json.loads(results.read_text())


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_two_nodes(outcomes: dict[str, str], scenario: str) -> None:
    assert outcomes[scenario] == "passed", outcomes[scenario]
