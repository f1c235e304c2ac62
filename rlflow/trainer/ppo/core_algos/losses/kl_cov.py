"""KL-Cov: the tokens of highest covariance pay for moving away from the old policy.

rho = exp(clamp(log_prob - old_log_prob, -20, 20)),  l = log_prob - old_log_prob
L   = -A rho + ppo_kl_coef |l|  for the k = max(int(kl_cov_ratio x tokens), 1) tokens of highest covariance
L   = -A rho                    for all others                             Cui et al. 2025, arXiv 2505.22617 (KL-Cov)

Nothing is clipped. Equal covariances are told apart by the token's own numbers (`covariance.pseudo_random_keys`), so
that the order of rows decides nothing. The reference does not bound the ratio.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.losses.covariance import picked_count, pseudo_random_keys, token_covariance
from rlflow.trainer.ppo.core_algos.losses.inputs import LossInputs, prepare
from rlflow.trainer.ppo.core_algos.losses.options import option, positive_option
from rlflow.trainer.ppo.core_algos.registry import register_policy_loss


@register_policy_loss("kl_cov")
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """KL-Cov; all tensors [B, T]. Options: policy_loss.{kl_cov_ratio, ppo_kl_coef}.

    Returns the scalar loss and `actor/ppo_kl` (mean of |new - old| log-prob, nats).
    """
    inputs = prepare(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    share = positive_option(config, "kl_cov_ratio", 2e-4)
    coefficient = option(config, "ppo_kl_coef", 0.1)
    distance = inputs.log_ratio.abs()
    losses = -inputs.advantages * torch.exp(inputs.bounded_log_ratio)
    losses = torch.where(_highest(inputs, share), losses + coefficient * distance, losses)
    return inputs.aggregate(losses, loss_agg_mode, config), inputs.means({"actor/ppo_kl": distance})


@torch.no_grad()
def _highest(inputs: LossInputs, share: float) -> Tensor:
    """The valid tokens of highest covariance, as a mask [B, T]."""
    covariance = token_covariance(inputs)[inputs.mask]
    by_key = pseudo_random_keys(inputs.old, inputs.new, inputs.advantages)[inputs.mask].argsort(stable=True)
    order = by_key[covariance[by_key].argsort(descending=True, stable=True)]
    chosen = torch.zeros_like(covariance, dtype=torch.bool)
    chosen[order[: picked_count(share, inputs.mask)]] = True
    highest = torch.zeros_like(inputs.mask)
    highest[inputs.mask] = chosen
    return highest
