"""`critic`: the value model of PPO, and how it is updated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.base import BaseConfig
from rlflow.config.model import HFModelConfig
from rlflow.config.profiler import ProfilerConfig
from rlflow.config.worker import LOSS_AGG_MODES, CheckpointConfig, FSDPEngineConfig, FSDPOptimizerConfig
from rlflow.utils.errors import ConfigError


@dataclass
class CriticConfig(BaseConfig):
    """How the critic is updated; what is not set follows the actor.

    Units: `ppo_mini_batch_size` counts prompts (x rollout.n rows), micro-batch sizes count rows of one forward, token
    budgets (`*_max_token_len_per_gpu`) count tokens of one forward when `use_dynamic_bsz`. `forward_*` are the sizes of
    the pass that computes values. `enable` null: a critic exists when the advantage estimator is gae.
    """

    strategy: str = "fsdp"
    enable: bool | None = None
    rollout_n: int = 1
    ppo_mini_batch_size: int = 256
    ppo_micro_batch_size: int | None = None
    ppo_micro_batch_size_per_gpu: int | None = None
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: int = 32768
    forward_max_token_len_per_gpu: int = 32768
    ppo_epochs: int = 1
    shuffle: bool = False
    data_loader_seed: int = 42
    cliprange_value: float = 0.5
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    model: HFModelConfig = field(default_factory=HFModelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)

    def __post_init__(self) -> None:
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            raise ConfigError(
                f"Invalid loss_agg_mode: critic.loss_agg_mode={self.loss_agg_mode!r}; "
                f"choose from {', '.join(LOSS_AGG_MODES)}"
            )


@dataclass
class FSDPCriticConfig(CriticConfig):
    """A critic trained by the FSDP engine."""

    forward_micro_batch_size: int | None = None
    forward_micro_batch_size_per_gpu: int | None = None
    grad_clip: float | None = 1.0
    ulysses_sequence_parallel_size: int = 1
    optim: FSDPOptimizerConfig = field(default_factory=lambda: FSDPOptimizerConfig(lr=1e-5))
    fsdp: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)


def need_critic(config: Any) -> bool:
    """A critic is needed by GAE, or asked for by `critic.enable` (a user's estimator may read values)."""
    enable = (config.get("critic") or {}).get("enable")
    return bool(config.algorithm.adv_estimator == "gae" if enable is None else enable)
