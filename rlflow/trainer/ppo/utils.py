"""What the parts of the trainer share: roles of worker groups, which of them a configuration needs, the run folder.

`create_rl_dataset` and `create_rl_sampler` live in `rlflow.data`; here is where users of verl look for them.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

from rlflow.config.checks import need_reference_policy
from rlflow.config.critic import need_critic
from rlflow.config.reward import need_reward_model
from rlflow.data import create_rl_dataset, create_rl_sampler

__all__ = [
    "Role",
    "create_rl_dataset",
    "create_rl_sampler",
    "need_critic",
    "need_reference_policy",
    "need_reward_model",
    "need_teacher_policy",
    "run_folder",
]


def need_teacher_policy(config: Any) -> bool:
    """A teacher is asked for by `distillation.enabled`, a key that this version does not have yet."""
    return bool(_select(config, "distillation.enabled"))


def _select(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = (config or {}).get(name)
    return config


def run_folder(config: Any) -> Path:
    """`trainer.default_local_dir`, absolute: where checkpoints and records of the run lie."""
    return Path(config.trainer.default_local_dir).expanduser().resolve()


class Role(Enum):
    """What a worker group does."""

    Actor = 0
    Rollout = 1
    ActorRollout = 2
    Critic = 3
    RefPolicy = 4
    RewardModel = 5
    ActorRolloutRef = 6
    Env = 7
    TeacherModel = 8

    def __str__(self) -> str:
        return _ROLE_NAMES[self]

    @classmethod
    def from_string(cls, name: str) -> Role:
        """The role of a name such as "actor_rollout" (any case); ValueError lists the names.

        "env" and "teacher" are names of roles that no worker group can be asked for by.
        """
        known = {text: role for role, text in _ROLE_NAMES.items() if role not in (Role.Env, Role.TeacherModel)}
        if name.lower() not in known:
            raise ValueError(f"no role {name!r}; roles: {', '.join(known)}")
        return known[name.lower()]


_ROLE_NAMES = {
    Role.Actor: "actor",
    Role.Rollout: "rollout",
    Role.ActorRollout: "actor_rollout",
    Role.Critic: "critic",
    Role.RefPolicy: "ref",
    Role.RewardModel: "rm",
    Role.ActorRolloutRef: "actor_rollout_ref",
    Role.Env: "env",
    Role.TeacherModel: "teacher",
}
