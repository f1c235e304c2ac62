"""Clipped surrogate with dual clip.

rho = exp(clamp(log_prob - old_log_prob, -20, 20))
M   = max(-A rho, -A clamp(rho, 1 - low, 1 + high))            Schulman et al. 2017, eq. 7
L   = min(M, -A c) where A < 0, else M                         Ye et al. 2020, eq. 5 (dual clip)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.aggregate import agg_loss, masked_mean
from rlflow.trainer.ppo.core_algos.registry import register_policy_loss


def clip_bounds(config: Any) -> tuple[float, float]:
    """(low, high) clip ranges; each falls back to `clip_ratio`."""
    low = config.clip_ratio if config.get("clip_ratio_low") is None else config.clip_ratio_low
    high = config.clip_ratio if config.get("clip_ratio_high") is None else config.clip_ratio_high
    return low, high


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
    """PPO-clip; all tensors [B, T].

    Returns the scalar loss and `actor/pg_clipfrac` (share of tokens where the clip is active), `actor/ppo_kl` (mean of
    old - new log-prob, nats), `actor/pg_clipfrac_lower` (share where the dual clip is active).
    """
    low, high = clip_bounds(config)
    bound = config.get("clip_ratio_c", 3.0)
    if bound <= 1.0:
        raise ValueError(f"actor.clip_ratio_c={bound} must be > 1")
    log_ratio = torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0)
    ratio = torch.exp(log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    surrogate = torch.maximum(plain, clipped)
    dual = -advantages * bound
    losses = torch.where(advantages < 0, torch.minimum(dual, surrogate), surrogate)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.get("global_batch_info", {}))
    with torch.no_grad():
        metrics = {
            "actor/pg_clipfrac": masked_mean((clipped > plain).float(), response_mask).item(),
            "actor/ppo_kl": masked_mean(-log_ratio, response_mask).item(),
            "actor/pg_clipfrac_lower": masked_mean(
                ((surrogate > dual) & (advantages < 0)).float(), response_mask
            ).item(),
        }
    return loss, metrics
