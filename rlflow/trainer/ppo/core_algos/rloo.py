"""REINFORCE leave-one-out.

    A_i = s_i - mean of the other scores of the group = n (s_i - mean_g) / (n - 1)
Ahmadian et al. 2024, "Back to Basics" (arXiv 2402.14740), eq. 8, after Kool et al. 2019. A group of one has no others:
`rloo` keeps the score, `rloo_vectorized` gives 0. Each token of the response mask gets A_i.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.group_stats import GroupStats, group_index, group_stats
from rlflow.trainer.ppo.core_algos.outcome import outcome_scores, row_lengths, spread
from rlflow.trainer.ppo.core_algos.registry import AdvantageEstimator, register_adv_est


def _score_minus_others(stats: GroupStats) -> Tensor:
    return stats.centred * stats.count / (stats.count - 1).clamp(min=1)


def rloo_rows(scores: Tensor, group: Tensor, lengths: Tensor, **kwargs: Any) -> Tensor:
    """Scores [N] and groups [N] -> advantages [N]; a group of one keeps its score."""
    stats = group_stats(scores, group)
    return torch.where(stats.alone, scores, _score_minus_others(stats))


def rloo_vectorized_rows(scores: Tensor, group: Tensor, lengths: Tensor, **kwargs: Any) -> Tensor:
    """Scores [N] and groups [N] -> advantages [N]; a group of one gets 0."""
    return _score_minus_others(group_stats(scores, group))


@register_adv_est(AdvantageEstimator.RLOO, outcome=rloo_rows)
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """RLOO.

    Args:
        token_level_rewards: [B, T] rewards.
        response_mask: [B, T], 1 = model token.
        index: [B] uid of each row's prompt.
        epsilon, config: not read.

    Returns:
        (advantages [B, T], the same tensor as returns).
    """
    scores = outcome_scores(token_level_rewards)
    return spread(rloo_rows(scores, group_index(index, scores.device), row_lengths(response_mask)), response_mask)


@register_adv_est(AdvantageEstimator.RLOO_VECTORIZED, outcome=rloo_vectorized_rows)
@torch.no_grad()
def compute_rloo_vectorized_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """RLOO where a group of one gets 0; arguments and result as in `compute_rloo_outcome_advantage`."""
    scores = outcome_scores(token_level_rewards)
    group = group_index(index, scores.device)
    return spread(rloo_vectorized_rows(scores, group, row_lengths(response_mask)), response_mask)
