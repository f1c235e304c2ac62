"""Attention that `scaled_dot_product_attention` cannot express: soft-capped scores, and masks of sliding windows."""

from __future__ import annotations

import torch
from torch import Tensor


def windowed_mask(mask: Tensor | None, length: int, window: int, device: torch.device) -> Tensor:
    """Which keys a query sees through a window: of those that it saw before, the last `window`, itself included.

    Args:
        mask: bool [..., q, kv]; a query sees a beginning of the keys. None: causal over `length` tokens.
        length: of the rows, where there is no mask.
        window: keys that a query sees, at least 1.
        device: of the result.

    Returns:
        bool of the shape of `mask`, or [1, 1, length, length]. No query is left without a key.
    """
    if mask is None:
        position = torch.arange(length, device=device)
        mask = (position.unsqueeze(0) <= position.unsqueeze(1)).view(1, 1, length, length)
    keys = torch.arange(mask.shape[-1], device=device)
    last = mask.sum(-1, keepdim=True) - 1
    return mask & (keys > last - window)


def soft_capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cap: float,
    scale: float | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(cap * tanh(q k^T * scale / cap)) v (Gemma 2, arXiv:2408.00118, section 2), softmax in fp32.

    Holds the scores of all heads: [B, heads, q, kv] several times.

    Args:
        query: [B, heads, q, d].
        key: [B, kv_heads, kv, d]; heads must be a multiple of kv_heads.
        value: as `key`.
        cap: bound of the scores, > 0.
        scale: factor of the scores; None: d ** -0.5.
        mask: bool (True: seen) or additive, [B or 1, 1, q, kv]; None: causal, for q = kv.
        dropout: probability on the attention weights.

    Returns:
        [B, heads, q, d] in the dtype of `value`.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(grouped, key.unsqueeze(2).transpose(-1, -2)).float()
    scores = torch.tanh(scores * (scale / cap)) * cap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    else:
        mask = mask.unsqueeze(2)
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    if dropout:
        weights = torch.nn.functional.dropout(weights, dropout)
    return torch.matmul(weights, value.unsqueeze(2)).flatten(1, 2)
