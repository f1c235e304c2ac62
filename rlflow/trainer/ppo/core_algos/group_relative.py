"""Group-relative advantages.

Score of a trajectory: s_i = sum_t r_it (over the whole row). Within the group g(i) of one prompt
    GRPO      A_i = (s_i - mean_g) / (std_g + eps)     Shao et al. 2024 (DeepSeekMath), section 4.1.2; sample std
    Dr. GRPO  A_i =  s_i - mean_g                      Liu et al. 2025, section 3.2 (`norm_adv_by_std_in_grpo=false`)
A group of one has mean 0 and std 1. Each token of the response mask gets A_i.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.group_stats import group_stats
from rlflow.trainer.ppo.core_algos.registry import AdvantageEstimator, register_adv_est


@register_adv_est(AdvantageEstimator.GRPO)
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """GRPO.

    Args:
        token_level_rewards: [B, T] rewards.
        response_mask: [B, T], 1 = model token.
        index: [B] uid of each row's prompt.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: divide by the standard deviation.

    Returns:
        (advantages [B, T], the same tensor as returns).
    """
    scores = token_level_rewards.sum(dim=-1)
    stats = group_stats(scores, index)
    alone = stats.count <= 1
    advantages = scores - torch.where(alone, torch.zeros_like(stats.mean), stats.mean)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (torch.where(alone, torch.ones_like(stats.std), stats.std) + epsilon)
    spread = advantages.unsqueeze(-1) * response_mask
    return spread, spread
