"""The clipped surrogate as older code calls it: options as arguments, a tuple of four as result."""

from __future__ import annotations

import warnings

from torch import Tensor

from rlflow.trainer.ppo.core_algos.aggregate import agg_loss, masked_mean
from rlflow.trainer.ppo.core_algos.losses.inputs import prepare
from rlflow.trainer.ppo.core_algos.losses.vanilla import dual_clip


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Deprecated: use `get_policy_loss_fn("vanilla")`. All tensors [B, T].

    Returns (loss, clipfrac, ppo_kl, clipfrac_lower), each a scalar tensor; the last three without gradient.
    """
    warnings.warn(
        'compute_policy_loss is deprecated; use get_policy_loss_fn("vanilla"), which takes the actor config',
        FutureWarning,
        stacklevel=2,
    )
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    if low is None or high is None:
        raise ValueError("give cliprange, or both cliprange_low and cliprange_high")
    inputs = prepare(old_log_prob, log_prob, advantages, response_mask)
    terms = dual_clip(inputs, low, high, clip_ratio_c)
    shares = (terms.clipped.float(), -inputs.bounded_log_ratio.detach(), terms.clipped_lower.float())
    clipfrac, ppo_kl, lower = (masked_mean(share, inputs.mask) for share in shares)
    return agg_loss(terms.losses, inputs.mask, loss_agg_mode), clipfrac, ppo_kl, lower
