"""What the parts of the trainer share: roles of worker groups, which of them a configuration needs, the run folder."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

from rlflow.config.checks import need_reference_policy
from rlflow.config.critic import need_critic

__all__ = ["Role", "need_critic", "need_reference_policy", "run_folder"]


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
        """The role of a name such as "actor_rollout" (any case); ValueError lists the names."""
        for role, text in _ROLE_NAMES.items():
            if text == name.lower():
                return role
        raise ValueError(f"no role {name!r}; roles: {', '.join(_ROLE_NAMES.values())}")


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
