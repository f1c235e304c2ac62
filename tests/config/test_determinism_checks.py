"""`rollout.full_determinism` is refused where it cannot hold, and is in every process's environment where it can."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlflow.config.determinism_checks import check_determinism
from rlflow.config.overrides import compose_config
from rlflow.trainer.constants_ppo import get_ppo_ray_runtime_env

ROLLOUT = "actor_rollout_ref.rollout"


def verdict(overrides: list[str]) -> tuple[str, str]:
    config = compose_config([f"{ROLLOUT}.name=hf", "trainer.device=cpu", *overrides])
    problems: list[str] = []
    notices: list[str] = []
    typed = SimpleNamespace(rollout=config.actor_rollout_ref.rollout, trainer=config.trainer)
    check_determinism(typed, problems, notices)
    return "\n".join(problems), "\n".join(notices)


def test_it_holds_by_default_on_a_cpu_and_costs_nothing_when_off() -> None:
    assert verdict([f"{ROLLOUT}.full_determinism=true"]) == ("", "")
    assert verdict([f"{ROLLOUT}.name=vllm", "trainer.v1.trainer_mode=separate_async"]) == ("", "")


@pytest.mark.parametrize(
    ("override", "problem", "notice"),
    [
        (f"{ROLLOUT}.name=vllm", "when requests arrive", ""),
        ("trainer.v1.trainer_mode=separate_async", "at a time, not at a token", ""),
        (f"{ROLLOUT}.agent.agent_loop_manager_class=my.Manager", "", "my.Manager must announce its sessions"),
        ("trainer.device=cuda", "", "only runs on a CPU are tested"),
    ],
)
def test_where_it_cannot_hold_it_says_so(override: str, problem: str, notice: str) -> None:
    problems, notices = verdict([f"{ROLLOUT}.full_determinism=true", override])
    assert problem in problems and bool(problem) == bool(problems)
    assert notice in notices and bool(notice) == bool(notices)


def test_the_environment_of_all_processes_follows_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    for name in ("RLFLOW_FULL_DETERMINISM", "VLLM_BATCH_INVARIANT", "MKL_DYNAMIC"):
        monkeypatch.delenv(name, raising=False)
    off = get_ppo_ray_runtime_env(compose_config([]))["env_vars"]
    assert off["PYTHONHASHSEED"] == "random" and "RLFLOW_FULL_DETERMINISM" not in off and "MKL_DYNAMIC" not in off
    chosen = [f"{ROLLOUT}.full_determinism=true", f"{ROLLOUT}.seed=9"]
    env = get_ppo_ray_runtime_env(compose_config(chosen))["env_vars"]
    assert env["PYTHONHASHSEED"] == "9", "the run's, not the shell's"
    assert (env["RLFLOW_FULL_DETERMINISM"], env["VLLM_BATCH_INVARIANT"], env["MKL_DYNAMIC"]) == ("1", "1", "FALSE")
    assert "MKL_CBWR" not in env, "the user's own choice is inherited"
