"""`algorithm`: advantage estimator, KL control and rollout correction."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlflow.config.base import BaseConfig
from rlflow.config.rollout_correction import RolloutCorrectionConfig


@dataclass
class KLControlConfig(BaseConfig):
    """Coefficient of the KL penalty inside the reward: fixed, or adaptive towards `target_kl`."""

    type: str = "fixed"
    kl_coef: float = 0.001
    horizon: int = 10000
    target_kl: float = 0.1


@dataclass
class FilterGroupsConfig(BaseConfig):
    """Dynamic sampling (DAPO, Yu et al. 2025, section 3.2): groups whose metric does not vary are dropped and replaced.

    Units: both limits count batches of `data.train_batch_size` prompts.
    """

    enable: bool = False
    metric: str | None = None
    max_num_gen_batches: int = 0
    max_inflight_gen_batches: int = 1


@dataclass
class PFPPOConfig(BaseConfig):
    """Options of `use_pf_ppo`, which this version does not have: only these values are accepted."""

    reweight_method: str = "pow"
    weight_pow: float = 2.0


@dataclass
class AlgoConfig(BaseConfig):
    """How rewards become advantages."""

    adv_estimator: str = "gae"
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    gdpo_reward_keys: list[str] | None = None
    gdpo_reward_weights: list[float] | None = None
    use_kl_in_reward: bool = False
    kl_penalty: str = "kl"
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    use_pf_ppo: bool = False
    pf_ppo: PFPPOConfig = field(default_factory=PFPPOConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig | None = field(default_factory=RolloutCorrectionConfig)
