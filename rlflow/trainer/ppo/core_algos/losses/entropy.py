"""Entropy of the next-token distribution.

H = logsumexp(z) - sum softmax(z) z,  in nats
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.aggregate import agg_loss


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """Aggregated entropy of logits [B, T, V] under a mask [B, T]; computed in fp32 at least.

    A logit of -inf (a forbidden token) has probability 0 and adds nothing.
    """
    safe = logits.masked_fill(~response_mask.bool().unsqueeze(-1), 0.0)
    log_prob = torch.log_softmax(safe.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    information = torch.where(log_prob.isneginf(), torch.zeros_like(log_prob), -log_prob)
    return agg_loss((log_prob.exp() * information).sum(dim=-1), response_mask, loss_agg_mode)
