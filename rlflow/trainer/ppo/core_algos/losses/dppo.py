"""Divergence PPO: a mask by how far the probability moved, instead of a clip of the ratio.

L = -A sg(min(rho, c)) log_prob sg(valid)          Qi et al. 2026, "Rethinking the Trust Region in LLM RL" (DPPO mask)
with p = pi_new(token), q = pi_old(token), and a token is valid when its step away from q is within the bound:
    dppo_tv   A > 0:  p - q <= high             else  p - q >= -low                      (total variation)
    dppo_kl   A > 0:  KL(q, p) <= high or p <= q   else  KL(q, p) <= low or p >= q       (binary KL)
    KL(q, p) = q log(q / p) + (1 - q) log((1 - q) / (1 - p))
`clip_ratio_low` and `clip_ratio_high` are these bounds; they are differences of probabilities (or nats), not of ratios.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.losses.inputs import LossInputs, prepare
from rlflow.trainer.ppo.core_algos.losses.options import clip_bounds, option
from rlflow.trainer.ppo.core_algos.registry import register_policy_loss

_EPSILON = 1e-8


@register_policy_loss("dppo_tv")
def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """DPPO, total variation; all tensors [B, T]. Options: clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c.

    Returns the scalar loss and `actor/pg_clipfrac` (share of tokens without gradient), `actor/ppo_kl` (nats),
    `actor/pg_clipfrac_lower` (share of valid tokens whose ratio is cut at c).
    """
    inputs = prepare(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    low, high = clip_bounds(config)
    with torch.no_grad():
        step = inputs.new.exp() - inputs.old.exp()
        valid = torch.where(inputs.advantages > 0, step <= high, step >= -low)
    return _masked_policy_gradient(inputs, valid, loss_agg_mode, config)


@register_policy_loss("dppo_kl")
def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """DPPO, binary KL; shapes, options and metrics as `compute_policy_loss_dppo_tv`."""
    inputs = prepare(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    low, high = clip_bounds(config)
    with torch.no_grad():
        p, q = inputs.new.exp(), inputs.old.exp()
        rest = torch.log((1 - q + _EPSILON) / (1 - p + _EPSILON))
        kl = q * (inputs.old - inputs.new) + (1 - q) * rest
        valid = torch.where(inputs.advantages > 0, (kl <= high) | (p <= q), (kl <= low) | (p >= q))
    return _masked_policy_gradient(inputs, valid, loss_agg_mode, config)


def _masked_policy_gradient(
    inputs: LossInputs, valid: Tensor, loss_agg_mode: str, config: Any
) -> tuple[Tensor, dict[str, Any]]:
    bound = option(config, "clip_ratio_c", 20.0)
    log_ratio = inputs.bounded_log_ratio.detach()
    ratio = torch.exp(log_ratio)
    losses = -inputs.advantages * ratio.clamp(max=bound) * valid * inputs.new
    return inputs.aggregate(losses, loss_agg_mode, config), inputs.means(
        {
            "actor/pg_clipfrac": ~valid,
            "actor/ppo_kl": -log_ratio,
            "actor/pg_clipfrac_lower": (ratio > bound) & valid,
        }
    )
