"""What `test_job_submit.py` runs in a process of its own: two raylets, a dashboard, and `ray job submit`.

    python submit_job.py RESULTS.json RUN_FOLDER OVERRIDE ...

Writes {scenario: "passed" or the traceback}.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.job_submission import JobStatus, JobSubmissionClient

CLI = [sys.executable, "-m", "ray.scripts.scripts", "job"]
MAIN = [sys.executable, "-m", "rlflow.trainer.main_ppo"]


class Scenarios:
    """Each public method is one; they run in this order."""

    def __init__(self, dashboard: str, run_folder: Path, overrides: list[str]) -> None:
        self.dashboard, self.run_folder, self.overrides = dashboard, run_folder, overrides
        self.client = JobSubmissionClient(dashboard)

    def a_submitted_run_trains_on_both_nodes(self) -> None:
        # A variable that the job and the run both name is no conflict.
        env = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"], "TOKENIZERS_PARALLELISM": "false"}}
        done = self._submit("good", ["--runtime-env-json", json.dumps(env)], [*self.overrides, *self._folder("good")])
        assert done.returncode == 0, done.stdout
        info = self.client.get_job_info("good")
        assert info.status == JobStatus.SUCCEEDED and info.driver_exit_code == 0
        assert "step" in self.client.get_job_logs("good")
        assert len(self._trained("good")) == 2
        self._nothing_left()

    def a_refused_configuration_keeps_its_exit_code(self) -> None:
        done = self._submit("bad", [], [*self.overrides, "trainer.no_such_key=1"])
        assert done.returncode != 0, done.stdout
        info = self.client.get_job_info("bad")
        assert info.status == JobStatus.FAILED and info.driver_exit_code == 2, info
        assert "no_such_key" in self.client.get_job_logs("bad")
        self._nothing_left()

    def ctrl_c_leaves_the_job_and_stop_ends_all_of_it(self) -> None:
        endless = ["trainer.total_training_steps=1000", "trainer.total_epochs=1000"]
        long = [*self.overrides, *self._folder("long"), *endless]
        follower = subprocess.Popen(
            [*CLI, "submit", "--address", self.dashboard, "--submission-id", "long", "--", *MAIN, *long],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._until(lambda: len(self._trained("long")) >= 1, "the first step")
        follower.send_signal(signal.SIGINT)
        follower.wait(30)
        steps = len(self._trained("long"))
        self._until(lambda: len(self._trained("long")) > steps, "another step after Ctrl-C")
        assert self.client.get_job_status("long") == JobStatus.RUNNING
        stop = subprocess.run(
            [*CLI, "stop", "--address", self.dashboard, "long"], timeout=60, capture_output=True, text=True
        )
        assert stop.returncode == 0, stop.stdout + stop.stderr
        assert self.client.get_job_status("long") == JobStatus.STOPPED
        self._nothing_left()

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _submit(self, name: str, options: list[str], overrides: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*CLI, "submit", "--address", self.dashboard, "--submission-id", name, *options, "--", *MAIN, *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=150,
        )

    def _folder(self, name: str) -> list[str]:
        return [f"trainer.default_local_dir={self.run_folder / name}"]

    def _trained(self, name: str) -> list[Any]:
        path = self.run_folder / name / "events.jsonl"
        return re.findall(r'"event": ?"trained"', path.read_text()) if path.exists() else []

    def _nothing_left(self) -> None:
        """No process of a run, and no actor of it that lives."""

        def left() -> list[str]:
            lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
            actors = [a for a in ray._private.state.actors().values() if a["State"] in ("ALIVE", "PENDING_CREATION")]
            # The supervisor of a job ends a little after it.
            return [line for line in lines if str(self.run_folder) in line and "submit_job.py" not in line] + [
                a["ActorClassName"] for a in actors
            ]

        self._until(lambda: not left(), lambda: f"the end of {left()}", 30.0)

    def _until(self, what: Callable[[], Any], label: str | Callable[[], str], timeout_s: float = 120.0) -> None:
        end = time.monotonic() + timeout_s
        while not what():
            if time.monotonic() > end:
                raise TimeoutError(f"no sign of {label if isinstance(label, str) else label()}")
            time.sleep(0.2)


def outcome(function: Callable[[], None]) -> str:
    try:
        function()
    except Exception:  # noqa: BLE001 - the test shows it
        return traceback.format_exc()
    return "passed"


def main() -> None:
    results, run_folder, *overrides = sys.argv[1:]
    cluster = Cluster()
    try:
        args = {"num_cpus": 4, "object_store_memory": 100 << 20}
        cluster.add_node(**args, include_dashboard=True, dashboard_port=0)
        cluster.add_node(**args)
        cluster.wait_for_nodes(timeout=60)
        ray.init(address=cluster.address, log_to_driver=False)
        dashboard = f"http://{cluster.head_node.webui_url or cluster.webui_url}"
        scenarios = Scenarios(dashboard, Path(run_folder), overrides)
        names = [name for name in vars(Scenarios) if not name.startswith("_")]
        Path(results).write_text(json.dumps({name: outcome(getattr(scenarios, name)) for name in names}))
        ray.shutdown()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
