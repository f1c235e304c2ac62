"""Group policy gradient.

    A_i = alpha (s_i - mean_g) / f_norm        alpha = B / max(rows with s != 0, 1)
Chu et al. 2025, "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning" (arXiv 2504.02546):
alpha makes up for rows that carry no reward, over the whole batch. A group of one has mean 0. Each token of the
response mask gets A_i.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.group_stats import group_index, group_stats
from rlflow.trainer.ppo.core_algos.outcome import outcome_scores, row_lengths, spread
from rlflow.trainer.ppo.core_algos.registry import AdvantageEstimator, register_adv_est


def gpg_rows(scores: Tensor, group: Tensor, lengths: Tensor, *, f_norm: float = 1.0, **kwargs: Any) -> Tensor:
    """Scores [N] and groups [N] -> advantages [N]; `f_norm` divides them."""
    stats = group_stats(scores, group)
    alpha = scores.numel() / scores.count_nonzero().clamp(min=1)
    return torch.where(stats.alone, scores, stats.centred) * alpha.to(scores.dtype) / f_norm


@register_adv_est(AdvantageEstimator.GPG, outcome=gpg_rows)
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """GPG.

    Args:
        token_level_rewards: [B, T] rewards.
        response_mask: [B, T], 1 = model token.
        index: [B] uid of each row's prompt.
        f_norm: divides the advantages.
        epsilon, alpha, config: not read; alpha is always that of the batch.

    Returns:
        (advantages [B, T], the same tensor as returns).
    """
    scores = outcome_scores(token_level_rewards)
    group = group_index(index, scores.device)
    return spread(gpg_rows(scores, group, row_lengths(response_mask), f_norm=f_norm), response_mask)
