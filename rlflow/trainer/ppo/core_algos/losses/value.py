"""Clipped squared error of a critic.

V_clip = clamp(V, V_old - eps, V_old + eps)
L      = max((V - R)^2, (V_clip - R)^2) / 2                   as in the PPO implementation of Schulman et al. 2017
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.aggregate import agg_loss, masked_mean
from rlflow.trainer.ppo.core_algos.valid import only_valid


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Value loss; all tensors [B, T]. What lies outside the mask, NaN too, is not read.

    Args:
        vpreds: values of the critic that is trained, with gradient.
        returns: targets.
        values: values of the critic before the update, around which predictions are clipped.
        response_mask: 1 = model token.
        cliprange_value: how far a prediction may move before its gradient is cut.
        loss_agg_mode: and the counts behind it: see `agg_loss`.

    Returns:
        The scalar loss, and the share of tokens (no gradient) at which the clipped error is the larger one.
    """
    vpreds, returns, values = (only_valid(tensor, response_mask) for tensor in (vpreds, returns, values))
    clipped = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    plain_error = (vpreds - returns).square()
    clipped_error = (clipped - returns).square()
    loss = 0.5 * agg_loss(
        torch.maximum(plain_error, clipped_error),
        response_mask,
        loss_agg_mode,
        dp_size=dp_size,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
        loss_scale_factor=loss_scale_factor,
    )
    with torch.no_grad():
        clipfrac = masked_mean((clipped_error > plain_error).float(), response_mask)
    return loss, clipfrac
