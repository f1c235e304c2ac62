"""Processes of a run that die or stop: the run recovers, or it ends in time with a message that names them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlflow.observe.journal import read_lines
from rlflow.trainer.ppo.trainer_sync import PPOTrainerSync
from rlflow.utils.errors import ContractError, DeadlineError

pytestmark = pytest.mark.timeout(200)

Run = Callable[..., Any]
# Generation takes a second or two, so that a fault meets sessions that run.
LONG = [
    "data.max_response_length=300",
    "actor_rollout_ref.rollout.ignore_eos=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024",
]


def process_of(title: str) -> psutil.Process:
    """The newest process of a Ray actor class."""
    end = time.monotonic() + 20
    while not (found := [p for p in psutil.Process().children(recursive=True) if is_of(p, title)]):
        assert time.monotonic() < end, f"no process of {title}"
        time.sleep(0.05)
    return max(found, key=lambda process: process.create_time())


def is_of(process: psutil.Process, title: str) -> bool:
    # Ray changes the title with every call; psutil, which reads it twice, may see half of each.
    try:
        return any(part.startswith(f"ray::{title}") for part in process.cmdline()[:1])
    except psutil.Error:
        return False


class Faulty(PPOTrainerSync):
    """Does something when the prompts of a step are with the agent loops."""

    faults: dict[int, Callable[[PPOTrainerSync], None]] = {}
    happened = 0.0

    def on_sample_begin(self) -> None:
        fault = self.faults.get(self.global_steps)
        if fault is not None:
            fault(self)
            type(self).happened = time.monotonic()


def faulty(faults: dict[int, Callable[[PPOTrainerSync], None]]) -> type[Faulty]:
    return type("Faulty", (Faulty,), {"faults": faults})


def kill(*titles: str) -> Callable[[PPOTrainerSync], None]:
    return lambda trainer: [process_of(title).kill() for title in titles][0]


def test_workers_and_a_rollout_replica_come_back_and_one_that_dies_too_often_is_named(
    run_trainer: Run,
    tiny_overrides: list[str],
    read_metrics: Callable[[], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    trainer_cls = faulty({1: kill("AgentLoopWorker"), 2: kill("HFServer"), 3: kill("RewardLoopWorker", "HFServer")})
    budget = "actor_rollout_ref.rollout.supervisor.max_restarts=1"
    with pytest.raises(ContractError) as error:
        run_trainer([*tiny_overrides, *LONG, budget, "trainer.total_training_steps=3"], trainer_cls)
    assert time.monotonic() - trainer_cls.happened < 60
    text = str(error.value)
    assert "None of the 2 sampled prompts of step 3 has a trajectory: every session failed" in text
    assert "no rollout server is alive, replica 0 is dead" in text and "max_restarts=1 is used up" in text
    first, second = (line["data"] for line in read_metrics())
    for line in (first, second):
        assert "training/rollout_failure/groups" not in line, "sessions of both steps were done again"
        assert line["training/reward/invalid"] == 0
    assert (first["supervisor/replicas_lost"], first["supervisor/replicas_serving"]) == (0, 1)
    assert (second["supervisor/replicas_lost"], second["supervisor/restarts"]) == (1, 1)
    events = list(read_lines(tmp_path / "checkpoints" / "events.jsonl"))
    replica = [(e["event"], e["step"]) for e in events if e["event"].startswith("replica_")]
    assert replica == [
        ("replica_serving", 0),
        *((f"replica_{what}", 2) for what in ("lost", "restarting", "restarted", "serving")),
        *((f"replica_{what}", 3) for what in ("lost", "gone")),
    ]
    trained = [e for e in events if e["event"] == "trained"]
    assert [(len(e["uids"]), e["rows"]) for e in trained] == [(2, 6), (2, 6)], "two prompts of three sessions a step"


@pytest.mark.parametrize(
    ("title", "part"),
    [("SimpleUnit", "storage units of the table are gone"), ("TransferQueueController", "TransferQueue controller")],
)
def test_a_dead_part_of_the_transfer_queue_ends_the_run_and_is_named(
    title: str, part: str, run_trainer: Run, tiny_overrides: list[str]
) -> None:
    trainer_cls = faulty({1: kill(title)})
    no_other = "transfer_queue.backend.SimpleStorage.replacement_units=0"
    with pytest.raises(Exception, match=part):
        run_trainer([*tiny_overrides, *LONG, no_other], trainer_cls)
    assert time.monotonic() - trainer_cls.happened < 60


def test_a_stopped_rollout_server_ends_the_run_with_a_report(run_trainer: Run, tiny_overrides: list[str]) -> None:
    stopped: list[int] = []

    def stop(trainer: PPOTrainerSync) -> None:
        assert trainer.runtime.actor_wg._settings.call_timeout_s == 1234.0
        stopped.extend(trainer.runtime.server_manager.rollout_replicas[0].pids)
        os.kill(stopped[0], signal.SIGSTOP)

    trainer_cls = faulty({1: stop})
    nobody_watches = "actor_rollout_ref.rollout.supervisor.enable=false"
    limits = ["trainer.stall_timeout_s=8", "trainer.call_timeout_s=1234", nobody_watches]
    try:
        with pytest.raises(DeadlineError) as error:
            run_trainer([*tiny_overrides, *LONG, *limits], trainer_cls)
        seconds = time.monotonic() - trainer_cls.happened
        _, alive = psutil.wait_procs([psutil.Process(pid) for pid in stopped if psutil.pid_exists(pid)], timeout=5)
        assert not alive
    finally:
        for pid in stopped:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
    print("ended after", seconds)
    assert 8 <= seconds < 40, "the limit, and a bounded end"
    text = str(error.value)
    assert "in `sample` (step 1, partition train): 0 of 2 prompt groups finished" in text
    assert f"rollout replica 0 (pid {stopped[0]}) gave no sign of life within 3 s; not heard since" in text
    assert "running: e0r" in text and "in 'generate turn 0' for" in text
    assert "owner: agent worker 0, last heartbeat 0 s ago" in text
    assert "next:  the run ends (trainer.stall_timeout_s)" in text
