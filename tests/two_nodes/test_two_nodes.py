"""Worker groups and a whole run over two Ray nodes (two raylets on this machine)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("nodes_job.py")


@pytest.mark.timeout(240)
def test_groups_and_the_main_job_on_two_nodes(
    cluster_environment: dict[str, str], tiny_overrides: list[str], tmp_path: Path
) -> None:
    results = tmp_path / "results.json"
    overrides = [*tiny_overrides, "trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
    env = {**cluster_environment, "RLFLOW_FILE_LOGGER_ROOT": str(tmp_path)}
    command = [sys.executable, str(JOB), str(results), str(tmp_path / "checkpoints"), *overrides]
    process = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        code = process.wait(200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    assert code == 0
    outcomes = json.loads(results.read_text())
    failed = {name: text for name, text in outcomes.items() if text != "passed"}
    assert not failed, "\n".join(f"{name}:\n{text}" for name, text in failed.items())
    assert len(outcomes) == 7
