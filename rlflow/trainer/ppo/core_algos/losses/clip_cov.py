"""Clip-Cov: a few tokens of high covariance lose their gradient.

rho  = exp(clamp(log_prob - old_log_prob, -20, 20))
L    = max(-A rho, -A clamp(rho, 1 - low, 1 + high)) corr                  Cui et al. 2025, arXiv 2505.22617 (Clip-Cov)
corr = 0 for k = max(int(clip_cov_ratio x tokens), 1) tokens picked at random among those with
       clip_cov_lb < cov < clip_cov_ub whose ratio is not clipped, else 1

The choice is pseudo-random in the token's own numbers (see `covariance.pseudo_random_keys`): repeatable, and
independent of the order of rows. The reference draws from the global generator and does not bound the ratio.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.losses.covariance import picked_count, pseudo_random_keys, token_covariance
from rlflow.trainer.ppo.core_algos.losses.inputs import LossInputs, prepare
from rlflow.trainer.ppo.core_algos.losses.options import clip_bounds, option, positive_option
from rlflow.trainer.ppo.core_algos.registry import register_policy_loss


@register_policy_loss("clip_cov")
def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Clip-Cov; all tensors [B, T]. Options: clip_ratio*, policy_loss.{clip_cov_ratio, clip_cov_lb, clip_cov_ub}.

    Returns the scalar loss and `actor/pg_clipfrac` (share of tokens that lost their gradient), `actor/ppo_kl` (nats).
    """
    inputs = prepare(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    low, high = clip_bounds(config)
    share = positive_option(config, "clip_cov_ratio", 2e-4)
    lower, upper = option(config, "clip_cov_lb", 1.0), option(config, "clip_cov_ub", 5.0)
    log_ratio = inputs.bounded_log_ratio
    ratio = torch.exp(log_ratio)
    plain = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1 - low, 1 + high)
    covariance = token_covariance(inputs)
    candidates = (covariance > lower) & (covariance < upper) & ~(clipped > plain)
    dropped = _pick(candidates & inputs.mask, picked_count(share, inputs.mask), inputs)
    losses = torch.maximum(plain, clipped) * ~dropped
    metrics = inputs.means({"actor/pg_clipfrac": dropped, "actor/ppo_kl": -log_ratio})
    return inputs.aggregate(losses, loss_agg_mode, config), metrics


@torch.no_grad()
def _pick(candidates: Tensor, count: int, inputs: LossInputs) -> Tensor:
    """At most `count` of the candidates [B, T], as a mask."""
    keys = pseudo_random_keys(inputs.old, inputs.new, inputs.advantages)[candidates]
    chosen = torch.zeros_like(keys, dtype=torch.bool)
    chosen[keys.argsort(stable=True)[:count]] = True
    picked = torch.zeros_like(candidates)
    picked[candidates] = chosen
    return picked
