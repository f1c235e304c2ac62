"""Generalised advantage estimation (Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE").

With the reward r_t of token t and V_t, the value of the state in which token t is chosen:
    delta_t = r_t + gamma V_next - V_t                 eq. 10
    A_t     = delta_t + gamma lam A_next               eq. 16, backward in t
    R_t     = A_t + V_t
"next" is the next token of the response mask. Tool output, which the policy did not write, lies between two of its
tokens without a step of its own: no discount, no value, no reward.

Invariant: advantages are whitened over all valid tokens of the batch; what stands outside the mask has no meaning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.aggregate import masked_whiten
from rlflow.trainer.ppo.core_algos.registry import AdvantageEstimator, register_adv_est
from rlflow.utils.torch_functional import at_least_fp32


@register_adv_est(AdvantageEstimator.GAE)
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """GAE; half precision is computed in fp32.

    Args:
        token_level_rewards: [B, T] rewards.
        values: [B, T] values of the critic.
        response_mask: [B, T], 1 = model token.
        gamma: discount per token.
        lam: lambda; 1 = Monte Carlo return minus value, 0 = one-step temporal difference.

    Returns:
        (whitened advantages [B, T], returns [B, T]).
    """
    values, token_level_rewards = at_least_fp32(values), at_least_fp32(token_level_rewards)
    # Column by column is row by row of the transposed: each step then reads memory that lies together.
    rewards, value, valid = (x.t().contiguous() for x in (token_level_rewards, values, response_mask.bool()))
    next_value = values.new_zeros(values.shape[0])
    running = torch.zeros_like(next_value)
    backward = torch.empty_like(value)
    for t in reversed(range(value.shape[0])):
        delta = rewards[t] + gamma * next_value - value[t]
        # Outside the mask the running advantage stands still, which is what is stored there.
        running = torch.where(valid[t], delta + gamma * lam * running, running)
        next_value = torch.where(valid[t], value[t], next_value)
        backward[t] = running
    advantages = backward.t().contiguous()
    return masked_whiten(advantages, response_mask), advantages + values
