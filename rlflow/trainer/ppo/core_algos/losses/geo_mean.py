"""Geometric-mean policy optimisation: the row's ratio is the geometric mean of its clipped token ratios.

l   = clamp(log_prob - old_log_prob, -20, 20),  s = sign(A)
x   = s min(s l, s clamp(l, -low, high))              Zhao et al. 2025, arXiv 2507.20673 (GMPO: clip in log space)
L_i = -A_i exp(sum_t x / tokens_i),  A_i = mean over the row's tokens of A
loss = sum of L_i over rows with tokens / rows of the mini-batch

`loss_agg_mode` is not read. Rows are counted over the whole mini-batch, which makes the loss independent of
micro-batches and ranks; the reference takes the mean over the rows of a micro-batch, masked ones included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.aggregate import agg_loss, masked_mean
from rlflow.trainer.ppo.core_algos.losses.inputs import prepare
from rlflow.trainer.ppo.core_algos.losses.options import clip_bounds, global_counts
from rlflow.trainer.ppo.core_algos.registry import register_policy_loss


@register_policy_loss("geo_mean")
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """GMPO; all tensors [B, T]. Options: clip_ratio, clip_ratio_low, clip_ratio_high (of the log ratio).

    Importance weights enter a row by their geometric mean. Returns the scalar loss and `actor/pg_clipfrac` and
    `actor/pg_clipfrac_lower` (share of tokens outside the clip range with A > 0 and A < 0), `actor/ppo_kl` (nats).
    """
    inputs = prepare(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    low, high = clip_bounds(config)
    mask, log_ratio = inputs.mask, inputs.bounded_log_ratio
    clipped = log_ratio.clamp(-low, high)
    sign = inputs.advantages.sign()
    chosen = sign * torch.minimum(sign * log_ratio, sign * clipped)
    row_ratio = torch.exp(masked_mean(chosen, mask, axis=-1))
    row_loss = -masked_mean(inputs.advantages, mask, axis=-1) * row_ratio
    if inputs.weights is not None:
        row_loss = row_loss * torch.exp(masked_mean(torch.log(inputs.weights + 1e-10), mask, axis=-1))
    # A row is one cell of a [B, 1] matrix, so that the counts of the mini-batch apply as for every other loss.
    counts = global_counts(config)
    loss = agg_loss(row_loss.unsqueeze(-1), mask.any(dim=-1, keepdim=True), "seq-mean-token-sum", **counts)
    outside = log_ratio != clipped
    return loss, inputs.means(
        {
            "actor/pg_clipfrac": outside & (inputs.advantages > 0),
            "actor/ppo_kl": -inputs.log_ratio,
            "actor/pg_clipfrac_lower": outside & (inputs.advantages < 0),
        }
    )
