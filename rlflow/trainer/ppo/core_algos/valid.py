"""Inputs of losses and corrections, made safe before any arithmetic.

Invariants
    - What lies outside the mask reaches neither a value nor a gradient: it is replaced on the way in. Masking the
      result is not enough, since the backward pass would still multiply 0 by NaN.
    - Half-precision inputs are computed in fp32; fp32 and fp64 stay as they are.
    - A log-prob of -inf (a token the policy cannot produce) counts as `LOG_PROB_FLOOR`, without gradient. NaN at a
      valid token is an error of the caller and stays NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

# exp(-1e4) is 0 in every precision, and squares and sums over long rows stay far from the end of fp32.
LOG_PROB_FLOOR = -1e4
# |log ratio| beyond which exp is cut: e^20 = 4.9e8, and its square is finite in fp32.
LOG_RATIO_BOUND = 20.0


def only_valid(values: Tensor, mask: Tensor) -> Tensor:
    """`values` in at least fp32, zero where the mask (of the same shape) is not set."""
    return _wide(values).masked_fill(~mask.bool(), 0.0)


def valid_log_prob(log_prob: Tensor, mask: Tensor | None = None) -> Tensor:
    """`only_valid` for log-probs (nats), which are also kept above `LOG_PROB_FLOOR`; no mask: all are valid."""
    valid = _wide(log_prob) if mask is None else only_valid(log_prob, mask)
    return valid.clamp(min=LOG_PROB_FLOOR)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(clamp(log_ratio, -20, 20)): a ratio that neither overflows nor becomes NaN in later products."""
    return torch.exp(log_ratio.clamp(min=-LOG_RATIO_BOUND, max=LOG_RATIO_BOUND))
