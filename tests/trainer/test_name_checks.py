"""Classes and functions that a configuration names are looked for before Ray starts, and not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.config.checks import validate_config
from rlflow.config.overrides import compose_config
from rlflow.trainer.name_checks import check_user_names
from rlflow.utils.errors import ConfigError

FILE = """
raise SystemExit("must not run before Ray starts")
class Data: ...
class Sampler: ...
def compute_score(): ...
"""


@pytest.fixture
def base(tmp_path: Path, tiny_model_dir: Path) -> list[str]:
    (tmp_path / "data.parquet").touch()
    (tmp_path / "user.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("def f(:\n")
    return [
        f"data.train_files={tmp_path}/data.parquet",
        f"data.val_files={tmp_path}/data.parquet",
        f"actor_rollout_ref.model.path={tiny_model_dir}",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "algorithm.adv_estimator=grpo",
        "trainer.device=cpu",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={tmp_path}/run",
    ]


def problems(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        validate_config(compose_config(overrides), check_user_names)
    return str(error.value)


def good(overrides: list[str]) -> None:
    validate_config(compose_config(overrides), check_user_names)


AGENT = "actor_rollout_ref.rollout.agent"


def test_names_that_are_there_pass_and_nothing_is_executed(base: list[str], tmp_path: Path) -> None:
    (tmp_path / "loops.yaml").write_text(
        "- {name: mine, _target_: rlflow.agent_loop.single_turn.SingleTurnAgentLoop}\n"
    )
    user = tmp_path / "user.py"
    good(base)
    good(
        [
            *base,
            f"reward.custom_reward_function.path={user}",
            f"data.custom_cls.path={user}",
            "data.custom_cls.name=Data",
        ]
    )
    good([*base, "reward.reward_manager.source=importlib", f"reward.reward_manager.module.path={user}",
          "reward.reward_manager.name=Sampler"])  # fmt: skip
    good([*base, f"{AGENT}.agent_loop_config_path={tmp_path}/loops.yaml", f"{AGENT}.default_agent_loop=mine"])
    # What the entry's module registers becomes known when the entry is loaded.
    good([*base, f"{AGENT}.agent_loop_config_path={tmp_path}/loops.yaml",
          f"{AGENT}.default_agent_loop=single_turn_agent",
          f"{AGENT}.agent_loop_manager_class=rlflow.agent_loop.manager.AgentLoopManagerTQ"])  # fmt: skip


def test_all_names_that_are_wrong_come_at_once_each_with_what_there_is(base: list[str], tmp_path: Path) -> None:
    user = tmp_path / "user.py"
    text = problems(
        [
            *base,
            f"reward.custom_reward_function.path={user}",
            "reward.custom_reward_function.name=compute_scores",
            "reward.reward_manager.name=naiv",
            f"data.custom_cls.path={user}",
            "data.custom_cls.name=Dat",
            f"trainer.v1.sampler.custom_sampler.path={tmp_path}/nowhere.py",
            "trainer.v1.sampler.custom_sampler.name=Sampler",
            f"{AGENT}.default_agent_loop=single_turn",
            f"{AGENT}.agent_loop_manager_class=rlflow.agent_loop.manager.Manager",
        ]
    )
    assert "the configuration has 6 problems" in text
    assert f"reward.custom_reward_function.name=compute_scores: {user} defines no compute_scores" in text
    assert "compute_score (it defines compute_score)" in text
    assert "reward.reward_manager.name=naiv is unknown" in text and "reward.reward_manager.name=naive" in text
    assert f"data.custom_cls.name=Dat: {user} defines no Dat.\n    try:    Data (it defines Data, Sampler)" in text
    assert "nowhere.py: no such file" in text
    assert f"{AGENT}.default_agent_loop=single_turn is unknown" in text and "single_turn_agent" in text
    assert "manager.py defines no Manager" in text and "AgentLoopManagerTQ" in text


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("data.custom_cls.name=Data", "data.custom_cls needs both path and name"),
        ("reward.custom_reward_function.path={folder}/broken.py", "broken.py, line 1 cannot be read as Python"),
        (AGENT + ".agent_loop_config_path={folder}/none.yaml", "none.yaml"),
        (AGENT + ".agent_loop_config_path={folder}/bad.yaml", "needs the keys name and _target_"),
        (AGENT + ".agent_loop_config_path={folder}/gone.yaml", "no module named 'no_such_pkg'"),
        (AGENT + ".agent_loop_manager_class=Manager", "is no dotted name"),
        ("reward.custom_reward_function.path=pkg://no_such_pkg.x", "no module named 'no_such_pkg'"),
    ],
)
def test_each_way_to_name_something_wrong(base: list[str], tmp_path: Path, override: str, part: str) -> None:
    (tmp_path / "bad.yaml").write_text("- {name: mine}\n")
    (tmp_path / "gone.yaml").write_text("- {name: mine, _target_: no_such_pkg.loops.Loop}\n")
    text = problems([*base, override.format(folder=tmp_path)])
    assert part in text
    assert "the configuration has 1 problem:" in text
