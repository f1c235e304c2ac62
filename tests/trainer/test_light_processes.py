"""Processes that compute nothing start without torch: its import is the larger part of a start.

The rows are what a process has imported before the environment of its libraries is complete, or ever.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlflow.trainer.constants_ppo import environment

CHECK = """
import sys
{code}
heavy = sorted({{name.split(".")[0] for name in sys.modules}} & {{"torch", "transformers", "tensordict", "pandas"}})
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""


def run(code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", CHECK.format(code=code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param(
            "rlflow.trainer.task_runner, rlflow.transfer_queue.controller, rlflow.transfer_queue.storage_simple, "
            "rlflow.reward_loop.worker, rlflow.reward_loop.child, rlflow.workers.rollout.load_balancer, "
            "rlflow.agent_loop.worker",
            id="controllers and CPU workers",
        ),
        pytest.param(
            "rlflow.single_controller.ray.host, rlflow.workers.rollout.hf.server, "
            "rlflow.workers.rollout.hf.scoring_server",
            id="before a process has its thread counts",
        ),
    ],
)
def test_modules_of_processes(modules: str) -> None:
    run(f"import ray, {modules}")


def test_an_environment_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_TEST_SET", "mine")
    monkeypatch.delenv("RLFLOW_TEST_UNSET", raising=False)
    with pytest.raises(RuntimeError), environment({"RLFLOW_TEST_SET": "theirs", "RLFLOW_TEST_UNSET": "1"}):
        assert os.environ["RLFLOW_TEST_SET"] == "theirs" and os.environ["RLFLOW_TEST_UNSET"] == "1"
        raise RuntimeError
    assert os.environ["RLFLOW_TEST_SET"] == "mine" and "RLFLOW_TEST_UNSET" not in os.environ
