"""A controller whose thread stands still ends the run and says where it stands."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlflow.trainer.follow import follow
from rlflow.trainer.watchdog import Watchdog
from rlflow.utils.errors import DeadlineError, RlflowError

pytestmark = pytest.mark.alone


def wait_for_ever(event: threading.Event) -> None:
    event.wait(timeout=60)


@pytest.fixture
def stuck() -> Iterator[threading.Thread]:
    event = threading.Event()
    thread = threading.Thread(target=wait_for_ever, args=(event,))
    thread.start()
    yield thread
    event.set()
    thread.join(timeout=5)


def test_a_thread_that_stands_still_is_reported_once_with_its_place(stuck: threading.Thread) -> None:
    reports: list[str] = []
    told = threading.Event()

    def on_stall(report: str) -> None:
        reports.append(report)
        told.set()

    assert stuck.ident is not None
    Watchdog(stuck.ident, 0.4, lambda: 0, on_stall, look_every_s=0.05)
    assert told.wait(timeout=10)
    assert reports[0].startswith("Stalled 0 s in the controller")
    assert "test_watchdog.py" in reports[0] and "in wait_for_ever" in reports[0]
    assert "next:  the run ends" in reports[0]


def test_reports_of_the_run_count_as_progress(stuck: threading.Thread) -> None:
    looks: list[int] = []
    told = threading.Event()

    def progress() -> int:
        looks.append(0)
        return len(looks) if len(looks) < 20 else 20

    assert stuck.ident is not None
    Watchdog(stuck.ident, 0.4, progress, lambda report: told.set(), look_every_s=0.05)
    assert told.wait(timeout=20)
    assert len(looks) > 20


class Controller:
    """Stands for the TaskRunner."""

    report: list[dict[str, Any]] = []

    def run(self, seconds: float, fail: bool = False) -> str:
        time.sleep(seconds)
        if fail:
            raise DeadlineError("stalled in a stage")
        return "done"

    def events(self, after: int, timeout_s: float) -> tuple[int, list[dict[str, Any]]]:
        if self.report:
            return after + 1, self.report
        time.sleep(min(timeout_s, 0.2))
        return after + 1, [{"type": "controller", "pid": os.getpid(), "host": "here"}] if after == 0 else []

    def stall(self) -> None:
        self.report = [{"type": "stalled", "text": "Stalled: password=hunter22"}]


@pytest.fixture
def controller(ray_cluster: None) -> Iterator[Any]:
    import ray

    handle = ray.remote(num_cpus=0, max_concurrency=4)(Controller).remote()
    yield handle
    ray.kill(handle)


def test_the_launcher_hands_on_the_result_and_the_error(controller: Any) -> None:
    assert follow(controller, controller.run.remote(0.5), None, 60.0) == "done"
    with pytest.raises(DeadlineError, match="stalled in a stage"):
        follow(controller, controller.run.remote(0.1, fail=True), None, 60.0)
    controller.stall.remote()
    with pytest.raises(DeadlineError, match=r"Stalled: password=\*\*\*"):
        follow(controller, controller.run.remote(60), None, 60.0)


def test_a_controller_that_is_stopped_or_dead_ends_the_wait_and_is_named(controller: Any) -> None:
    import ray

    _, [facts] = ray.get(controller.events.remote(0, 0.0), timeout=30)
    started = time.monotonic()
    result = controller.run.remote(60)
    stop = threading.Timer(1.0, os.kill, (facts["pid"], signal.SIGSTOP))
    stop.start()
    with pytest.raises(DeadlineError) as error:
        follow(controller, result, None, 3.0)
    assert time.monotonic() - started < 15
    assert f"owner: TaskRunner, process {facts['pid']} on here; last heartbeat" in str(error.value)
    os.kill(facts["pid"], signal.SIGKILL)
    with pytest.raises(RlflowError, match="the controller process died"):
        follow(controller, result, None, 60.0)
