"""Clipped surrogate with dual clip.

rho = exp(clamp(log_prob - old_log_prob, -20, 20))
M   = max(-A rho, -A clamp(rho, 1 - low, 1 + high))            Schulman et al. 2017, eq. 7
L   = min(M, -A c) where A < 0, else M                         Ye et al. 2020, eq. 5 (dual clip)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.losses.inputs import LossInputs, prepare
from rlflow.trainer.ppo.core_algos.losses.options import clip_bounds, option
from rlflow.trainer.ppo.core_algos.registry import register_policy_loss


class DualClip(NamedTuple):
    """Loss per token, and where each clip is active; all [B, T]."""

    losses: Tensor
    clipped: Tensor
    clipped_lower: Tensor


def dual_clip(inputs: LossInputs, low: float, high: float, bound: float) -> DualClip:
    """The formula of this file; ValueError for a `bound` (c) that is not above 1."""
    if bound <= 1.0:
        raise ValueError(f"actor.clip_ratio_c={bound} must be > 1")
    ratio = torch.exp(inputs.bounded_log_ratio)
    advantages = inputs.advantages
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    surrogate = torch.maximum(plain, clipped)
    dual = -advantages * bound
    losses = torch.where(advantages < 0, torch.minimum(dual, surrogate), surrogate)
    return DualClip(losses, clipped > plain, (surrogate > dual) & (advantages < 0))


@register_policy_loss("ppo")
@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """PPO-clip; all tensors [B, T]. Options: clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c (3.0).

    Returns the scalar loss and `actor/pg_clipfrac` (share of tokens where the clip is active), `actor/ppo_kl` (mean of
    old - new log-prob, nats), `actor/pg_clipfrac_lower` (share where the dual clip is active).
    """
    inputs = prepare(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    low, high = clip_bounds(config)
    terms = dual_clip(inputs, low, high, bound=option(config, "clip_ratio_c", 3.0))
    return inputs.aggregate(terms.losses, loss_agg_mode, config), inputs.means(
        {
            "actor/pg_clipfrac": terms.clipped,
            "actor/ppo_kl": -inputs.bounded_log_ratio,
            "actor/pg_clipfrac_lower": terms.clipped_lower,
        }
    )
