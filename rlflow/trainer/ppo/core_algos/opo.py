"""On-policy RL with optimal reward baseline.

    b_g = sum_i L_i s_i / sum_i L_i        A_i = s_i - b_g
with L_i, the valid tokens of row i, standing in for the squared norm of its score function: Hao et al. 2025,
"On-Policy RL with Optimal Reward Baseline" (arXiv 2505.23585). A group of one, or without any token, has b = 0. Each
token of the response mask gets A_i.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.group_stats import group_index, group_stats, group_sum
from rlflow.trainer.ppo.core_algos.outcome import outcome_scores, row_lengths, spread
from rlflow.trainer.ppo.core_algos.registry import AdvantageEstimator, register_adv_est


def opo_rows(scores: Tensor, group: Tensor, lengths: Tensor, **kwargs: Any) -> Tensor:
    """Scores [N], groups [N] and valid tokens [N] -> advantages [N]."""
    stats = group_stats(scores, group)
    tokens = group_sum(lengths, stats.group)
    # Weighing the deviations instead of the scores loses nothing where scores are large: s - b = (s - mean) - b'.
    offset = group_sum(lengths * stats.centred, stats.group) / tokens.clamp(min=1)
    advantages = (stats.centred - offset).to(scores.dtype)
    return torch.where(stats.alone | (tokens == 0), scores, advantages)


@register_adv_est(AdvantageEstimator.OPO, outcome=opo_rows)
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """OPO.

    Args:
        token_level_rewards: [B, T] rewards.
        response_mask: [B, T], 1 = model token.
        index: [B] uid of each row's prompt.
        epsilon, config: not read.

    Returns:
        (advantages [B, T], the same tensor as returns).
    """
    scores = outcome_scores(token_level_rewards)
    return spread(opo_rows(scores, group_index(index, scores.device), row_lengths(response_mask)), response_mask)
