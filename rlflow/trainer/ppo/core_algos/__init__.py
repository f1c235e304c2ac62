"""The maths of RL post-training: tensors in, tensors out.

Needs torch only: no Ray, no configuration tree, no GPU. Users register their own:

    from rlflow.trainer.ppo.core_algos import register_adv_est

    @register_adv_est("mine")
    def mine(token_level_rewards, response_mask, index, config=None, **kwargs):
        ...
        return advantages, returns          # both [B, T]

and select it with `algorithm.adv_estimator=mine`. One file a family; adding an algorithm is one file and one test.
"""

from __future__ import annotations

from rlflow.trainer.ppo.core_algos.aggregate import agg_loss
from rlflow.trainer.ppo.core_algos.gae import compute_gae_advantage_return
from rlflow.trainer.ppo.core_algos.gdpo import compute_gdpo_outcome_advantage
from rlflow.trainer.ppo.core_algos.gpg import compute_gpg_outcome_advantage
from rlflow.trainer.ppo.core_algos.group_relative import (
    compute_grpo_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
)
from rlflow.trainer.ppo.core_algos.group_stats import GroupStats, group_stats
from rlflow.trainer.ppo.core_algos.kl import (
    AdaptiveKLController,
    FixedKLController,
    get_kl_controller,
    kl_penalty,
    kl_penalty_forward,
)
from rlflow.trainer.ppo.core_algos.losses.bypass import compute_policy_loss_bypass_mode
from rlflow.trainer.ppo.core_algos.losses.cispo import compute_policy_loss_cispo
from rlflow.trainer.ppo.core_algos.losses.clip_cov import compute_policy_loss_clip_cov
from rlflow.trainer.ppo.core_algos.losses.deprecated import compute_policy_loss
from rlflow.trainer.ppo.core_algos.losses.dppo import compute_policy_loss_dppo_kl, compute_policy_loss_dppo_tv
from rlflow.trainer.ppo.core_algos.losses.dro import compute_policy_loss_dro
from rlflow.trainer.ppo.core_algos.losses.entropy import compute_entropy_loss
from rlflow.trainer.ppo.core_algos.losses.geo_mean import compute_policy_loss_geo_mean
from rlflow.trainer.ppo.core_algos.losses.gpg import compute_policy_loss_gpg
from rlflow.trainer.ppo.core_algos.losses.gspo import compute_policy_loss_gspo
from rlflow.trainer.ppo.core_algos.losses.kl_cov import compute_policy_loss_kl_cov
from rlflow.trainer.ppo.core_algos.losses.reinforce import compute_policy_loss_reinforce
from rlflow.trainer.ppo.core_algos.losses.sapo import compute_policy_loss_sapo
from rlflow.trainer.ppo.core_algos.losses.value import compute_value_loss
from rlflow.trainer.ppo.core_algos.losses.vanilla import compute_policy_loss_vanilla
from rlflow.trainer.ppo.core_algos.opo import compute_opo_outcome_advantage
from rlflow.trainer.ppo.core_algos.optimal_token_baseline import (
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
)
from rlflow.trainer.ppo.core_algos.passk import compute_grpo_passk_outcome_advantage
from rlflow.trainer.ppo.core_algos.registry import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    AdvantageEstimator,
    PolicyLossFn,
    get_adv_estimator_fn,
    get_outcome_fn,
    get_policy_loss_fn,
    register_adv_est,
    register_policy_loss,
)
from rlflow.trainer.ppo.core_algos.reinforce_plus_plus import (
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
)
from rlflow.trainer.ppo.core_algos.remax import compute_remax_outcome_advantage
from rlflow.trainer.ppo.core_algos.rewards import compute_rewards
from rlflow.trainer.ppo.core_algos.rloo import (
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
)
from rlflow.trainer.ppo.core_algos.rollout_correction import compute_rollout_correction
from rlflow.trainer.ppo.core_algos.valid import only_valid

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "POLICY_LOSS_REGISTRY",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "GroupStats",
    "PolicyLossFn",
    "agg_loss",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_multi_turn_optimal_token_baseline_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rewards",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_policy_loss",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_reinforce",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "compute_rollout_correction",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_outcome_fn",
    "get_policy_loss_fn",
    "group_stats",
    "kl_penalty",
    "kl_penalty_forward",
    "only_valid",
    "register_adv_est",
    "register_policy_loss",
]
