"""Clipped importance-sampling weights: every token keeps its gradient, only its weight is clipped.

rho = exp(clamp(log_prob - old_log_prob, -20, 20))
L   = -sg(clamp(rho, 1 - low, 1 + high)) A log_prob                        MiniMax-M1 2025, arXiv 2506.13585, eq. 4-5
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.losses.inputs import prepare
from rlflow.trainer.ppo.core_algos.losses.options import clip_bounds
from rlflow.trainer.ppo.core_algos.registry import register_policy_loss


@register_policy_loss("cispo")
def compute_policy_loss_cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """CISPO; all tensors [B, T]. Options: clip_ratio, clip_ratio_low (>= 1: no lower clip), clip_ratio_high.

    Returns the scalar loss and `actor/pg_clipfrac` (share of tokens with a clipped weight), `actor/ppo_kl` (nats),
    `actor/pg_clipfrac_lower` (0).
    """
    inputs = prepare(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    low, high = clip_bounds(config)
    log_ratio = inputs.bounded_log_ratio.detach()
    ratio = torch.exp(log_ratio)
    weight = ratio.clamp(1 - low, 1 + high)
    loss = inputs.aggregate(-weight * inputs.advantages * inputs.new, loss_agg_mode, config)
    metrics = inputs.means({"actor/pg_clipfrac": ratio != weight, "actor/ppo_kl": -log_ratio})
    return loss, metrics | {"actor/pg_clipfrac_lower": 0.0}
