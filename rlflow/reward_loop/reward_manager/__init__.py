"""Reward managers: how one trajectory becomes a score. The registry is open to users."""

from rlflow.reward_loop.reward_manager.base import RewardManagerBase
from rlflow.reward_loop.reward_manager.registry import (
    get_reward_manager_cls,
    register,
    resolve_reward_manager_cls,
)

__all__ = ["RewardManagerBase", "get_reward_manager_cls", "register", "resolve_reward_manager_cls"]
