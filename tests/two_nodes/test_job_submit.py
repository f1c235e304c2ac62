"""`ray job submit` of the main job on two nodes: it trains, its exit code counts, and stopping it leaves nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("submit_job.py")
DASHBOARD = ("aiohttp", "aiohttp_cors", "colorful", "opencensus")


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in DASHBOARD), reason="needs the dashboard of ray[default]"
)
def test_the_main_job_as_a_submitted_job(
    cluster_environment: dict[str, str], tiny_overrides: list[str], tmp_path: Path
) -> None:
    results = tmp_path / "results.json"
    overrides = [item for item in tiny_overrides if not item.startswith("trainer.default_local_dir=")]
    overrides += ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
    env = {**cluster_environment, "RLFLOW_FILE_LOGGER_ROOT": str(tmp_path)}
    command = [sys.executable, str(JOB), str(results), str(tmp_path / "runs"), *overrides]
    process = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        code = process.wait(400)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    assert code == 0
    outcomes = json.loads(results.read_text())
    failed = {name: text for name, text in outcomes.items() if text != "passed"}
    assert not failed, "\n".join(f"{name}:\n{text}" for name, text in failed.items())
    assert len(outcomes) == 3
