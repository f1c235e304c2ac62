"""Runs on the tiny model (the fixtures of tests/e2e), and what a fault may leave behind."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

_spec = importlib.util.spec_from_file_location("e2e_fixtures", Path(__file__).parents[1] / "e2e" / "conftest.py")
assert _spec is not None and _spec.loader is not None
_e2e = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_e2e)
tiny_overrides, run_trainer, read_metrics = _e2e.tiny_overrides, _e2e.run_trainer, _e2e.read_metrics


class Launched:
    """A launcher in a process group of its own, and everything below it.

    Args:
        overrides: of the command line.
        folder: for its log.
        env: further environment variables.
    """

    def __init__(self, overrides: list[str], folder: Path, env: dict[str, str] | None = None) -> None:
        run_folder = next(item for item in overrides if item.startswith("trainer.default_local_dir="))
        self.run_folder = Path(run_folder.partition("=")[2])
        self.log = folder / "launcher.log"
        self._mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
        self._shm = set(os.listdir("/dev/shm"))
        # Workers of a cluster that was there before inherit nothing from the launcher.
        mark = f"+ray_kwargs.ray_init.runtime_env={{env_vars:{{TEST_MARK:{self._mark}}}}}"
        inherited = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlflow.trainer.main_ppo", *overrides, mark],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**inherited, "RLFLOW_FILE_LOGGER_ROOT": str(folder), "TEST_MARK": self._mark, **(env or {})},
                start_new_session=True,
            )
        self._below: set[psutil.Process] = set()

    def wait_for(self, what: Callable[[], Any], timeout_s: float = 120.0) -> Any:
        """Wait until `what()` is true."""
        end = time.monotonic() + timeout_s
        while not (found := what()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        """Lines of the run's journal."""
        path = self.run_folder / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in found if event["event"] == name]

    def family(self) -> set[psutil.Process]:
        """Everything alive that the launcher started: below it, or carrying its environment."""
        found = set(self._below)
        try:
            found |= set(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            pass
        for process in psutil.process_iter():
            try:
                if process.environ().get("TEST_MARK") == self._mark and process.pid != self.process.pid:
                    found.add(process)
            except psutil.Error:
                continue
        self._below = {p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE}
        return set(self._below)

    def titles(self) -> set[str]:
        """Names of the family's processes; those of Ray say what they run."""
        found = set()
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                found.add(process.name())
        return found

    def end(self, within_s: float) -> tuple[int, float]:
        """(exit code, seconds until it and everything below it was gone); fails when anything stays."""
        started = time.monotonic()
        try:
            code = self.process.wait(timeout=within_s)
            psutil.wait_procs(self._below, timeout=max(0.1, started + within_s - time.monotonic()))
            while self.family() and time.monotonic() < started + within_s:
                time.sleep(0.05)
            seconds = time.monotonic() - started
            assert not self.family(), (self.family(), self.log.read_text())
            assert set(os.listdir("/dev/shm")) <= self._shm
            return code, seconds
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher lives after {within_s} s:\n{self.log.read_text()}") from None
        finally:
            self.kill()

    def kill(self) -> None:
        """Whatever happened, leave nothing."""
        for process in self.family():
            process.kill()
        self.process.kill()
        self.process.wait(timeout=10)


@pytest.fixture
def attached(ray_cluster: None) -> dict[str, str]:
    """Environment with which a launcher uses the Ray cluster of the test session."""
    import ray

    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """`launch(overrides, env)` starts the command."""
    launched: list[Launched] = []

    def start(overrides: list[str], env: dict[str, str] | None = None) -> Launched:
        launched.append(Launched(overrides, tmp_path, env))
        return launched[-1]

    yield start
    for one in launched:
        one.kill()
