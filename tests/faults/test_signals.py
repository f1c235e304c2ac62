"""SIGINT, SIGTERM and SIGKILL to the launcher end a whole run: in time, with the journal closed, without orphans."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(200)

Launch = Callable[..., Any]
END_WITHIN_S = 10.0
LONG_ANSWERS = [
    "data.max_response_length=900",
    "actor_rollout_ref.rollout.ignore_eos=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
    "trainer.total_training_steps=100",
]


def test_ctrl_c_while_generating_ends_the_run(launch: Launch, tiny_overrides: list[str]) -> None:
    run = launch([*tiny_overrides, *LONG_ANSWERS])
    run.wait_for(lambda: run.events("issued"))
    assert {"raylet", "ray::HFServer"} <= run.titles() and len(run.family()) > 15, run.titles()
    os.killpg(run.process.pid, signal.SIGINT)  # a terminal sends it to the whole foreground group
    code, seconds = run.end(END_WITHIN_S)
    assert code == 130
    [end] = run.events("run_ended")
    assert (end["exit_code"], end["reason"]) == (130, "ended by SIGINT")
    assert not run.events("trained")
    assert "Traceback" not in run.log.read_text()


@pytest.mark.slow
def test_ctrl_c_while_a_replica_starts_again(launch: Launch, tiny_overrides: list[str]) -> None:
    run = launch([*tiny_overrides, *LONG_ANSWERS])
    run.wait_for(lambda: run.events("issued"))
    [server] = run.events("replica_serving")[-1]["pids"]
    os.kill(server, signal.SIGKILL)
    run.wait_for(lambda: run.events("replica_restarting"))
    run.wait_for(lambda: any(title.startswith("ray::HFServer") for title in run.titles()))
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end(END_WITHIN_S)[0] == 130
    [end] = run.events("run_ended")
    assert end["reason"] == "ended by SIGINT"


def test_sigterm_while_training_leaves_the_cluster_it_was_attached_to(
    launch: Launch, tiny_overrides: list[str], attached: dict[str, str]
) -> None:
    import ray

    run = launch([*tiny_overrides, "actor_rollout_ref.actor.ppo_epochs=100000"], attached)
    run.wait_for(lambda: any(event["stage"] == "adv" for event in run.events("stage")))
    run.wait_for(lambda: "ray::actor_rollout.update_actor" in run.titles())
    run.process.terminate()
    code, seconds = run.end(END_WITHIN_S)
    assert code == 143
    [end] = run.events("run_ended")
    assert (end["exit_code"], end["step"]) == (143, 1)
    assert ray.get(ray.remote(num_cpus=0)(lambda: 5).remote(), timeout=60) == 5


def test_sigint_while_models_load(launch: Launch, tiny_overrides: list[str], attached: dict[str, str]) -> None:
    run = launch(tiny_overrides, attached)
    run.wait_for((run.run_folder / "run.lock").exists)
    run.wait_for(lambda: any(title.startswith("ray::RoleHost") for title in run.titles()))
    run.process.send_signal(signal.SIGINT)
    assert run.end(END_WITHIN_S)[0] == 130


def test_sigterm_while_ray_starts(launch: Launch, tiny_overrides: list[str]) -> None:
    run = launch(tiny_overrides)
    run.wait_for(lambda: "gcs_server" in run.titles())
    run.process.terminate()
    assert run.end(END_WITHIN_S)[0] == 143
    assert not run.run_folder.exists()


def test_when_the_launcher_is_killed_everything_else_ends_by_itself(launch: Launch, tiny_overrides: list[str]) -> None:
    run = launch([*tiny_overrides, *LONG_ANSWERS])
    run.wait_for(lambda: {"raylet", "ray::HFServer"} <= run.titles())
    assert any("rlflow.reward_loop.child" in process.cmdline() for process in run.family())
    run.process.kill()
    code, seconds = run.end(END_WITHIN_S)
    assert code == -signal.SIGKILL
