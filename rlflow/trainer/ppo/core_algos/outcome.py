"""What the outcome estimators share: one score a row in, one value a row out, the same for all its tokens.

Each of them is two functions: `..._rows`, the formula on scores [N], and `compute_..._outcome_advantage`, the public
form on padded tensors [B, T], which sums the rewards, calls the formula and spreads the result over the mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.utils.torch_functional import at_least_fp32


def outcome_scores(token_level_rewards: Tensor) -> Tensor:
    """Score of each row: the sum of its rewards [B, T] over the whole row, masked or not; at least fp32 [B]."""
    return at_least_fp32(token_level_rewards).sum(dim=-1)


def spread(advantages: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Values [B] on the valid tokens of each row; (advantages [B, T], the same tensor as returns)."""
    over_tokens = advantages.unsqueeze(-1) * response_mask
    return over_tokens, over_tokens


def whiten_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """Whiten over tokens, where every valid token of row i has `values[i]`.

    The token-weighted form of `masked_whiten`: mean and sample variance count row i `lengths[i]` times.

    Args:
        values: [N], any number where the length is 0.
        lengths: [N] valid tokens of each row.
    """
    weights = lengths.double()
    exact = torch.where(weights > 0, values.double(), 0.0)
    tokens = weights.sum()
    mean = (weights * exact).sum() / tokens.clamp(min=1)
    variance = (weights * (exact - mean).square()).sum() / (tokens - 1).clamp(min=1)
    return ((exact - mean) * torch.rsqrt(variance + 1e-8)).to(values.dtype)


def option(config: Any, name: str, default: Any = None) -> Any:
    """`config[name]` of a config node, dict or namespace; `default` when there is no config or no such key."""
    if config is None:
        return default
    get = getattr(config, "get", None)
    return get(name, default) if callable(get) else getattr(config, name, default)


def row_lengths(response_mask: Tensor) -> Tensor:
    """Valid tokens of each row, [B]."""
    return response_mask.sum(dim=-1, dtype=torch.float32)


def rewards_to_go(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Undiscounted return of each token: the sum of the valid rewards from there to the end of the row, [B, T]."""
    rewards = at_least_fp32(token_level_rewards)
    rewards = torch.where(response_mask.bool(), rewards, torch.zeros_like(rewards))
    return rewards.flip(-1).cumsum(-1).flip(-1)
