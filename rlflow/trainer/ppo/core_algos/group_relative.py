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

from rlflow.trainer.ppo.core_algos.group_stats import group_index, group_stats
from rlflow.trainer.ppo.core_algos.outcome import outcome_scores, row_lengths, spread
from rlflow.trainer.ppo.core_algos.registry import AdvantageEstimator, register_adv_est


def grpo_rows(
    scores: Tensor,
    group: Tensor,
    lengths: Tensor,
    *,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    **kwargs: Any,
) -> Tensor:
    """GRPO on one score a row.

    Args:
        scores: [N] float.
        group: int64 [N].
        lengths: [N], not needed here.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: divide by the standard deviation.

    Returns:
        advantages [N].
    """
    stats = group_stats(scores, group)
    advantages = torch.where(stats.alone, scores, stats.centred)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (torch.where(stats.alone, 1.0, stats.std) + epsilon)
    return advantages


@register_adv_est(AdvantageEstimator.GRPO, outcome=grpo_rows)
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
        config: not read.

    Returns:
        (advantages [B, T], the same tensor as returns).
    """
    scores = outcome_scores(token_level_rewards)
    rows = grpo_rows(
        scores,
        group_index(index, scores.device),
        row_lengths(response_mask),
        epsilon=epsilon,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
    )
    return spread(rows, response_mask)


@register_adv_est(AdvantageEstimator.GRPO_VECTORIZED, outcome=grpo_rows)
@torch.no_grad()
def compute_grpo_vectorized_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """GRPO under the name that its vectorised form has elsewhere; here `grpo` is vectorised itself."""
    return compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo, config
    )
