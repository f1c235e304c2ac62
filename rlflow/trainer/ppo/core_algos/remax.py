"""ReMax: the score of the greedy response is the baseline.

    G_t = sum_{k >= t} r_k m_k        A_t = (G_t - b_i) m_t
with b_i the reward of the response decoded greedily from the same prompt: Li et al. 2024, "ReMax: A Simple, Effective,
and Efficient Reinforcement Learning Method for Aligning Large Language Models" (arXiv 2310.10505), algorithm 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.outcome import rewards_to_go
from rlflow.trainer.ppo.core_algos.registry import AdvantageEstimator, register_adv_est


@register_adv_est(AdvantageEstimator.REMAX)
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """ReMax.

    Args:
        token_level_rewards: [B, T] rewards.
        reward_baselines: [B] reward of each row's greedy response.
        response_mask: [B, T], 1 = model token.
        config: not read.

    Returns:
        (advantages [B, T], returns [B, T]).
    """
    returns = rewards_to_go(token_level_rewards, response_mask)
    # Not a product: a row without valid tokens may have no baseline (NaN).
    advantages = torch.where(response_mask.bool(), returns - reward_baselines.to(returns).unsqueeze(-1), 0.0)
    return advantages, returns
