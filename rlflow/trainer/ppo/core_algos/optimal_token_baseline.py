"""Optimal token baseline: the baseline of every token that minimises the variance of the gradient.

    G_t = sum_{k >= t} r_k m_k                                  return of token t
    w_t = ||onehot(y_t) - pi_t||^2 = 1 - 2 pi_t(y_t) + sum_v pi_t(v)^2     squared norm of the score w.r.t. the logits
    W_t = sum_{k <= t} w_k m_k                                  (w_t rho_t^2 with importance weights rho)
    b_t = sum_i G_it W_it m_it / (sum_i W_it m_it + eps)        over the rows i of a group, per column t
    A_t = (G_t - b_t) m_t
Li et al. 2026, "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL"; E[G W] / E[W] minimises
E[W (G - b)^2], with the squared norm of the sum of scores taken as the sum of squared norms.

A group of one has b = 0. Where only the longest row of a group is left, its own return would be its baseline and its
advantage 0: `handle_zero_tail` sets b = 0 from the second longest length on. The multi-turn form (tir) lets column t
be the t-th valid token of each row, so that tool output shifts nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.group_stats import group_count, group_index
from rlflow.trainer.ppo.core_algos.outcome import rewards_to_go
from rlflow.trainer.ppo.core_algos.registry import AdvantageEstimator, register_adv_est
from rlflow.utils.groupwise import segment_sum
from rlflow.utils.torch_functional import at_least_fp32


def squared_score_norms(
    old_log_probs: Tensor, sum_pi_squared: Tensor, valid: Tensor, rollout_is_weights: Tensor | None = None
) -> Tensor:
    """w_t m_t [B, T]: squared norm of the score of each valid token, 0 outside the mask.

    Args:
        old_log_probs: [B, T]; -inf is a token of probability 0.
        sum_pi_squared: [B, T] sum over the vocabulary of squared probabilities.
        valid: bool [B, T].
        rollout_is_weights: [B, T] or None; their squares weigh the norms.
    """
    norms = 1.0 - 2.0 * at_least_fp32(old_log_probs).exp() + at_least_fp32(sum_pi_squared)
    if rollout_is_weights is not None:
        norms = norms * at_least_fp32(rollout_is_weights).square()
    return torch.where(valid, norms, 0.0)


def _accumulated(norms: Tensor, valid: Tensor) -> Tensor:
    """W_t m_t [B, T]: running sum of w over valid tokens, 0 outside the mask."""
    return norms.cumsum(-1).masked_fill_(~valid, 0.0)


def _baselines(
    returns: Tensor, weights: Tensor, lengths: Tensor, group: Tensor, epsilon: float, handle_zero_tail: bool
) -> Tensor:
    """b [B, T] from G and W m [B, T]; a row of length 0 adds nothing to its group."""
    groups = group_count(group)
    weighted = segment_sum(returns * weights, group, groups)
    baselines = (weighted / (segment_sum(weights, group, groups) + epsilon))[group]
    if handle_zero_tail:
        longest = lengths.new_zeros(groups).scatter_reduce(0, group, lengths, "amax")
        is_longest = lengths == longest[group]
        several = segment_sum(is_longest.long(), group, groups)[group] > 1
        others = torch.where(is_longest, torch.zeros_like(lengths), lengths)
        second = lengths.new_zeros(groups).scatter_reduce(0, group, others, "amax")[group]
        columns = torch.arange(returns.shape[1], device=returns.device)
        tail = (is_longest & ~several).unsqueeze(1) & (columns >= second.unsqueeze(1))
        baselines = baselines.masked_fill_(tail, 0.0)
    return baselines


def _without_groups_of_one(baselines: Tensor, group: Tensor, members: Tensor) -> Tensor:
    """b, with 0 where the group has fewer than two `members` (bool [B])."""
    count = segment_sum(members.long(), group, group_count(group))[group]
    return baselines.masked_fill_((count < 2).unsqueeze(1), 0.0)


@register_adv_est(AdvantageEstimator.OPTIMAL_TOKEN_BASELINE)
@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """OTB.

    Args:
        token_level_rewards: [B, T] rewards.
        response_mask: [B, T], 1 = model token.
        index: [B] uid of each row's prompt.
        old_log_probs: [B, T] log-probs of the sampled tokens.
        sum_pi_squared: [B, T] sum over the vocabulary of squared probabilities.
        rollout_is_weights: [B, T] importance weights or None.
        handle_zero_tail: no baseline for the part of the longest row that no other row of its group reaches.
        epsilon: added to the denominator.

    Returns:
        (advantages [B, T], returns [B, T]).
    """
    valid, group = response_mask.bool(), group_index(index, response_mask.device)
    returns = rewards_to_go(token_level_rewards, response_mask)
    weights = _accumulated(squared_score_norms(old_log_probs, sum_pi_squared, valid, rollout_is_weights), valid)
    baselines = _baselines(returns, weights, valid.sum(-1), group, epsilon, handle_zero_tail)
    baselines = _without_groups_of_one(baselines, group, torch.ones_like(group, dtype=torch.bool))
    return torch.where(valid, returns - baselines, 0.0), returns


@register_adv_est(AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE)
@torch.no_grad()
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """OTB for responses with tool output; arguments and result as in `compute_optimal_token_baseline_advantage`.

    A row without a valid token does not count as a member of its group.
    """
    valid, group = response_mask.bool(), group_index(index, response_mask.device)
    lengths = valid.sum(-1)
    returns = rewards_to_go(token_level_rewards, response_mask)
    weights = _accumulated(squared_score_norms(old_log_probs, sum_pi_squared, valid, rollout_is_weights), valid)
    # The k-th valid token of a row goes to column k; what lies behind the last one stays 0.
    columns = torch.arange(valid.shape[1], device=valid.device) < lengths.unsqueeze(1)
    empty = torch.zeros_like(returns)
    turns = empty.masked_scatter(columns, returns.masked_select(valid))
    turn_weights = empty.masked_scatter(columns, weights.masked_select(valid))
    baselines = _baselines(turns, turn_weights, lengths, group, epsilon, handle_zero_tail)
    baselines = _without_groups_of_one(baselines, group, lengths > 0)
    return empty.masked_scatter(valid, (turns - baselines).masked_select(columns)), returns
