"""Advantages for the best of a group (pass@k).

With the two highest scores s_(1) >= s_(2) of a group:
    A_i = (s_(1) - s_(2)) [/ (std_g + eps)]   for the row of s_(1), 0 for all others
the leave-one-out estimate of what the row adds to the maximum: Tang et al. 2025, "Optimizing Language Models for
Inference Time Objectives using Reinforcement Learning" (arXiv 2503.19595), section on pass@k. Equal best scores give 0
everywhere. Each token of the response mask gets A_i.

A group of one row has no second best. The public form refuses it; the per-row form, which the trainer uses, gives it 0,
because a reward that failed late in a run may leave one row of a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.group_stats import group_count, group_index, group_stats
from rlflow.trainer.ppo.core_algos.outcome import option, outcome_scores, row_lengths, spread
from rlflow.trainer.ppo.core_algos.registry import AdvantageEstimator, register_adv_est


def grpo_passk_rows(
    scores: Tensor, group: Tensor, lengths: Tensor, *, config: Any = None, epsilon: float = 1e-6, **kwargs: Any
) -> Tensor:
    """Pass@k advantages on one score a row.

    Args:
        scores: [N] float.
        group: int64 [N]; a group of one row, where there is nothing to compare, gets 0.
        lengths: [N], not needed here.
        config: `norm_adv_by_std_in_grpo` (default true) divides by the standard deviation.
        epsilon: added to the standard deviation.

    Raises:
        ValueError: no config.
    """
    if config is None:
        raise ValueError("grpo_passk reads norm_adv_by_std_in_grpo from its config: pass the `algorithm` node")
    stats = group_stats(scores, group)
    groups = group_count(stats.group)
    lowest = scores.new_full((groups,), float("-inf"))
    best = lowest.scatter_reduce(0, stats.group, scores, "amax")
    is_best = scores == best[stats.group]
    # The second best of a group with one best row is the maximum of the others; with several, it equals the best.
    others = scores.masked_fill(is_best, float("-inf"))
    second = lowest.scatter_reduce(0, stats.group, others, "amax")
    bests = torch.zeros_like(best).index_add_(0, stats.group, is_best.to(scores.dtype))
    gap = torch.where(bests > 1, 0.0, best - second)[stats.group].masked_fill(stats.alone, 0.0)
    if option(config, "norm_adv_by_std_in_grpo", True):
        gap = gap / (stats.std + epsilon)
    return torch.where(is_best, gap, 0.0)


@register_adv_est(AdvantageEstimator.GRPO_PASSK, outcome=grpo_passk_rows)
@torch.no_grad()
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Pass@k.

    Args:
        token_level_rewards: [B, T] rewards.
        response_mask: [B, T], 1 = model token.
        index: [B] uid of each row's prompt; at least two rows each.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: not read; the key of that name in `config` decides.
        config: the `algorithm` node.

    Returns:
        (advantages [B, T], the same tensor as returns).

    Raises:
        ValueError: no config, or a group of one row.
    """
    scores = outcome_scores(token_level_rewards)
    group = group_index(index, scores.device)
    alone = int((torch.bincount(group) == 1).sum())
    if alone:
        raise ValueError(
            f"grpo_passk compares the two best rows of a group, but {alone} of {group_count(group)} groups have one "
            "row. Try actor_rollout_ref.rollout.n >= 2, or algorithm.adv_estimator=grpo."
        )
    rows = grpo_passk_rows(scores, group, row_lengths(response_mask), config=config, epsilon=epsilon)
    return spread(rows, response_mask)
