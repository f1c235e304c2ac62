"""Every option once: the YAML groups (beside this file), the typed dataclass of each node, and the checks.

Invariant: the YAML tree and the dataclasses hold the same keys with the same defaults (a test compares them).
"""

from __future__ import annotations

from rlflow.config.algorithm import AlgoConfig, FilterGroupsConfig, KLControlConfig
from rlflow.config.base import BaseConfig, omega_conf_to_dataclass
from rlflow.config.critic import CriticConfig, FSDPCriticConfig
from rlflow.config.data import DataConfig
from rlflow.config.model import HFModelConfig
from rlflow.config.reward import CustomFunctionConfig, RewardConfig, RewardManagerConfig, RewardModelConfig
from rlflow.config.rollout import (
    AgentLoopConfig,
    CheckpointEngineConfig,
    RolloutConfig,
    SamplingConfig,
    SupervisorConfig,
)
from rlflow.config.rollout_correction import RolloutCorrectionConfig
from rlflow.config.trainer import TrainerConfig
from rlflow.config.worker import (
    ActorConfig,
    CheckpointConfig,
    EngineConfig,
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    OptimizerConfig,
    PolicyLossConfig,
    RefConfig,
    TrainingWorkerConfig,
)

__all__ = [
    "ActorConfig",
    "AgentLoopConfig",
    "AlgoConfig",
    "BaseConfig",
    "CheckpointConfig",
    "CheckpointEngineConfig",
    "CriticConfig",
    "CustomFunctionConfig",
    "DataConfig",
    "EngineConfig",
    "FSDPActorConfig",
    "FSDPCriticConfig",
    "FSDPEngineConfig",
    "FSDPOptimizerConfig",
    "FilterGroupsConfig",
    "HFModelConfig",
    "KLControlConfig",
    "OptimizerConfig",
    "PolicyLossConfig",
    "RefConfig",
    "RewardConfig",
    "RewardManagerConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "SamplingConfig",
    "SupervisorConfig",
    "TrainerConfig",
    "TrainingWorkerConfig",
    "omega_conf_to_dataclass",
]
