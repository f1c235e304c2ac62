"""Group sequence policy optimisation: one ratio a row, with a gradient for every token.

s_i = mean over the row's tokens of (log_prob - old_log_prob)               Zheng et al. 2025, arXiv 2507.18071, eq. 7
S   = exp(min(sg(s_i) + log_prob - sg(log_prob), 10))                       eq. 14 (value s_i, gradient of each token)
L   = max(-A S, -A clamp(S, 1 - low, 1 + high)), aggregated seq-mean-token-mean                             eq. 5

`loss_agg_mode` is not read: the loss of a row is its own mean whatever else is chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.aggregate import masked_sum
from rlflow.trainer.ppo.core_algos.losses.inputs import prepare
from rlflow.trainer.ppo.core_algos.losses.options import clip_bounds
from rlflow.trainer.ppo.core_algos.registry import register_policy_loss


@register_policy_loss("gspo")
def compute_policy_loss_gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """GSPO; all tensors [B, T]. Options: clip_ratio, clip_ratio_low, clip_ratio_high (of the row's ratio: about 3e-4).

    Returns the scalar loss and `actor/pg_clipfrac` (share of tokens in clipped rows), `actor/ppo_kl` (nats),
    `actor/pg_clipfrac_lower` (0).
    """
    inputs = prepare(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    low, high = clip_bounds(config)
    log_ratio = inputs.log_ratio.detach()
    tokens = inputs.mask.sum(dim=-1, keepdim=True).clamp(min=1)
    row_log_ratio = masked_sum(log_ratio, inputs.mask, axis=-1).unsqueeze(-1) / tokens
    ratio = torch.exp((inputs.new - inputs.new.detach() + row_log_ratio).clamp(max=10.0))
    plain = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1 - low, 1 + high)
    loss = inputs.aggregate(torch.maximum(plain, clipped), "seq-mean-token-mean", config)
    metrics = inputs.means({"actor/pg_clipfrac": clipped > plain, "actor/ppo_kl": -log_ratio})
    return loss, metrics | {"actor/pg_clipfrac_lower": 0.0}
