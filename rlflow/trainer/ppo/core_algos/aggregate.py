"""From a loss per token to one number, independent of how the batch was split.

Contract: the engine gives the counts of the whole MINI-batch over all data-parallel ranks (`batch_num_tokens`,
`global_batch_size`) and `dp_size`. A micro-batch then contributes local sum / global count x dp_size; gradients are
averaged over ranks, so that the sum over micro-batches and ranks is the exact global mean for any split.
"""

from __future__ import annotations

from torch import Tensor

from rlflow.utils.torch_functional import masked_mean, masked_sum, masked_whiten

__all__ = ["agg_loss", "masked_mean", "masked_sum", "masked_whiten"]


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Aggregate a loss per token [B, T] to a scalar.

    Modes: token-mean = sum / tokens; token-sum; seq-mean-token-sum = sum / rows; seq-mean-token-mean = mean over rows
    of the row's token mean; seq-mean-token-sum-norm = seq-mean-token-sum / loss_scale_factor (default: the width T).
    Missing counts are taken from this batch, which is only right for one rank (ValueError otherwise). A mini-batch
    without any token gives 0, not NaN.
    """
    if dp_size > 1 and loss_agg_mode == "token-mean" and batch_num_tokens is None:
        raise ValueError("token-mean over several ranks needs batch_num_tokens (tokens of the mini-batch on all ranks)")
    if loss_agg_mode == "token-sum":
        return masked_sum(loss_mat, loss_mask) * dp_size
    if loss_agg_mode == "token-mean":
        tokens = loss_mask.sum() if batch_num_tokens is None else batch_num_tokens
        return masked_sum(loss_mat, loss_mask) / _at_least_one(tokens) * dp_size
    if loss_agg_mode not in ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        raise ValueError(f"Invalid loss_agg_mode: {loss_agg_mode!r}")
    if dp_size > 1 and global_batch_size is None:
        raise ValueError(
            f"{loss_agg_mode} over several ranks needs global_batch_size (rows of the mini-batch on all ranks)"
        )
    row_tokens = loss_mask.sum(dim=-1)
    per_row = masked_sum(loss_mat, loss_mask, axis=-1)
    if loss_agg_mode == "seq-mean-token-mean":
        per_row = per_row / (row_tokens + 1e-8)
    rows = (row_tokens > 0).sum() if global_batch_size is None else global_batch_size
    loss = per_row.sum() / _at_least_one(rows) * dp_size
    if loss_agg_mode == "seq-mean-token-sum-norm":
        loss = loss / (loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    return loss


def _at_least_one(count: Tensor | float) -> Tensor | float:
    """Counts are whole numbers; 0 (nothing to learn from) must give loss 0 instead of 0 / 0."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
