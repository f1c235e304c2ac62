"""Soft adaptive policy optimisation: a smooth gate instead of a clip.

rho = exp(clamp(log_prob - old_log_prob, -20, 20))
L   = -A sigmoid(tau (rho - 1)) 4 / tau,  tau = tau_pos where A > 0, else tau_neg   Gao et al. 2025, arXiv 2511.20347
aggregated seq-mean-token-mean. At rho = 1 the gate has slope 1; `loss_agg_mode` is not read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.losses.inputs import prepare
from rlflow.trainer.ppo.core_algos.losses.options import positive_option
from rlflow.trainer.ppo.core_algos.registry import register_policy_loss


@register_policy_loss("sapo")
def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """SAPO; all tensors [B, T]. Options: tau_pos (1.0), tau_neg (1.05), at `actor.policy_loss` or at `actor`.

    Returns the scalar loss and `actor/ppo_kl` (nats), `actor/pg_clipfrac`, `actor/pg_clipfrac_lower` (both 0).
    """
    inputs = prepare(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    positive, negative = positive_option(config, "tau_pos", 1.0), positive_option(config, "tau_neg", 1.05)
    log_ratio = inputs.bounded_log_ratio
    ratio = torch.exp(log_ratio)
    tau = torch.where(inputs.advantages > 0, positive, negative).to(ratio.dtype)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    loss = inputs.aggregate(-gate * inputs.advantages, "seq-mean-token-mean", config)
    metrics = inputs.means({"actor/ppo_kl": -log_ratio})
    return loss, metrics | {"actor/pg_clipfrac": 0.0, "actor/pg_clipfrac_lower": 0.0}
