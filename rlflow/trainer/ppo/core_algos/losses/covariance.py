"""What clip_cov and kl_cov share: the covariance of a token, and how many tokens are picked by it.

cov_t = (A_t - mean A)(log_prob_t - mean log_prob), means over the valid tokens   Cui et al. 2025, arXiv 2505.22617

The means and the number of picked tokens are those of the batch a loss is called with, a micro-batch: the selection
(and so the gradient) of these losses depends on how the mini-batch was split.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.losses.inputs import LossInputs


@torch.no_grad()
def token_covariance(inputs: LossInputs) -> Tensor:
    """cov_t [B, T], -inf outside the mask; no gradient.

    In fp64 until the end: rounded to fp32 it no longer shows in which order the means were summed, so that equal
    covariances are equal in every order of the rows.
    """
    advantages, new, mask = inputs.advantages.double(), inputs.new.detach().double(), inputs.mask
    covariance = (advantages - advantages[mask].mean()) * (new - new[mask].mean())
    return covariance.float().masked_fill(~mask, -torch.inf)


def picked_count(share: float, mask: Tensor) -> int:
    """int(share x tokens), at least 1."""
    return max(int(share * int(mask.sum())), 1)


@torch.no_grad()
def pseudo_random_keys(*tensors: Tensor) -> Tensor:
    """A number in [0, 2^31 - 1) per element, int64, mixed from the fp32 bits of the tensors at that element.

    It takes the place of a random permutation: a choice by these keys is the same in every run and for every order,
    packing and padding of the rows, and no generator's state is touched.
    """
    modulus = 2**31 - 1
    keys = torch.zeros(tensors[0].shape, dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        bits = tensor.to(torch.float32).contiguous().view(torch.int32).to(torch.int64) & modulus
        # Two rounds of a linear congruence (Park-Miller constants); products stay below 2^63.
        keys = ((keys ^ bits) * 48271 + 12345) % modulus
        keys = (keys ^ (keys >> 15)) * 1103515245 % modulus
    return keys
