"""Roles, and what a configuration needs."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from rlflow.config.overrides import compose_config
from rlflow.data import create_rl_sampler
from rlflow.trainer.ppo import utils
from rlflow.trainer.ppo.utils import Role, need_reward_model, need_teacher_policy


def test_roles_have_their_names_and_most_are_found_by_them() -> None:
    names = ["actor", "rollout", "actor_rollout", "critic", "ref", "rm", "actor_rollout_ref"]
    assert [str(Role.from_string(name.upper())) for name in names] == names
    for name in ("env", "teacher", "judge"):
        with pytest.raises(ValueError, match=f"no role '{name}'; roles: actor, "):
            Role.from_string(name)


def test_what_a_configuration_needs() -> None:
    tree = compose_config(["actor_rollout_ref.rollout.name=hf"])
    assert not need_reward_model(tree) and not need_teacher_policy(tree)
    asked = OmegaConf.create({"reward": {"reward_model": {"enable": True}}, "distillation": {"enabled": True}})
    assert need_reward_model(asked) and need_teacher_policy(asked)


def test_data_is_made_where_users_of_verl_look_for_it() -> None:
    assert utils.create_rl_sampler is create_rl_sampler
    assert callable(utils.create_rl_dataset)
