"""`reward`: who scores a session, with which function, under which deadline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.base import BaseConfig
from rlflow.utils.errors import ConfigError


@dataclass
class CustomFunctionConfig(BaseConfig):
    """The user's scorer: file path (or pkg://), function name, and keyword arguments that override the call's."""

    path: str | None = None
    name: str = "compute_score"
    reward_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class ModuleConfig(BaseConfig):
    """A Python file by path."""

    path: str | None = None
    name: str = "custom_reward_manager"


@dataclass
class RewardManagerConfig(BaseConfig):
    """The reward manager: a registered name, or (source=importlib) the class `name` of `module.path`."""

    source: str = "register"
    name: str = "naive"
    module: ModuleConfig = field(default_factory=ModuleConfig)

    def __post_init__(self) -> None:
        if self.source not in ("register", "importlib"):
            raise ConfigError(f"reward.reward_manager.source={self.source!r} is unknown; use register or importlib")
        if self.source == "importlib" and not self.module.path:
            raise ConfigError("reward.reward_manager.source=importlib needs reward.reward_manager.module.path")


@dataclass
class RewardConfig(BaseConfig):
    """Rule rewards. `timeout_s`: seconds one scorer call may take; then its process is killed and the sample masked.

    `load_timeout_s`: seconds the import of the scorer's file may take.
    """

    num_workers: int = 8
    processes_per_worker: int = 2
    timeout_s: float = 30.0
    load_timeout_s: float = 60.0
    custom_reward_function: CustomFunctionConfig = field(default_factory=CustomFunctionConfig)
    reward_manager: RewardManagerConfig = field(default_factory=RewardManagerConfig)
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
