"""Roles of worker groups, and which of them a configuration needs."""

from __future__ import annotations

from enum import Enum
from typing import Any

from rlflow.config.checks import need_reference_policy

__all__ = ["Role", "need_critic", "need_reference_policy"]


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


def need_critic(config: Any) -> bool:
    """Only GAE needs values."""
    return bool(config.algorithm.adv_estimator == "gae")
