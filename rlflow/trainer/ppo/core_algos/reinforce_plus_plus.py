"""REINFORCE++ and its form with a group baseline (Hu et al. 2025, arXiv 2501.03262).

    reinforce_plus_plus            G_t = r_t + gamma G_{t+1}                       A_t = whiten(G)_t
    reinforce_plus_plus_baseline   A_t = whiten(s_i - mean_g), the same for all tokens of row i
Whitening runs over all valid tokens of the batch. G starts anew in front of every token outside the mask: a reward
behind (or on) tool output does not reach the tokens before it. A group of one has mean 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.aggregate import masked_whiten
from rlflow.trainer.ppo.core_algos.group_stats import group_index, group_stats
from rlflow.trainer.ppo.core_algos.outcome import option, outcome_scores, row_lengths, spread, whiten_rows
from rlflow.trainer.ppo.core_algos.registry import AdvantageEstimator, register_adv_est
from rlflow.utils.torch_functional import at_least_fp32


def reinforce_plus_plus_baseline_rows(scores: Tensor, group: Tensor, lengths: Tensor, **kwargs: Any) -> Tensor:
    """Scores [N], groups [N] and valid tokens [N] -> advantages [N]."""
    stats = group_stats(scores, group)
    return whiten_rows(torch.where(stats.alone, scores, stats.centred), lengths)


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE, outcome=reinforce_plus_plus_baseline_rows)
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """REINFORCE++-baseline.

    Args:
        token_level_rewards: [B, T] rewards.
        response_mask: [B, T], 1 = model token.
        index: [B] uid of each row's prompt.
        epsilon, config: not read.

    Returns:
        (advantages [B, T], the same tensor as returns).
    """
    scores = outcome_scores(token_level_rewards)
    group = group_index(index, scores.device)
    return spread(reinforce_plus_plus_baseline_rows(scores, group, row_lengths(response_mask)), response_mask)


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """REINFORCE++.

    Args:
        token_level_rewards: [B, T] rewards.
        response_mask: [B, T], 1 = model token.
        config: the `algorithm` node; `gamma` is the discount per token.

    Returns:
        (whitened advantages [B, T], discounted returns [B, T]).

    Raises:
        ValueError: no config.
    """
    if config is None:
        raise ValueError("reinforce_plus_plus reads gamma from its config: pass the `algorithm` node")
    gamma = option(config, "gamma", 1.0)
    # Column by column is row by row of the transposed: each step then reads memory that lies together.
    rewards = at_least_fp32(token_level_rewards).t().contiguous()
    valid = response_mask.bool().t().contiguous()
    carry = rewards.new_zeros(rewards.shape[1])
    backward = torch.empty_like(rewards)
    for t in reversed(range(rewards.shape[0])):
        backward[t] = rewards[t] + gamma * carry
        carry = torch.where(valid[t], backward[t], 0.0)
    returns = backward.t().contiguous()
    # Not a product: what stands outside the mask may be NaN.
    return torch.where(response_mask.bool(), masked_whiten(returns, response_mask), 0.0), returns
