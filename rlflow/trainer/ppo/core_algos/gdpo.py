"""GDPO: normalise each component of the reward on its own, then add.

    A_i = whiten( sum_k w_k GRPO(s^k)_i )
with s^k_i, component k of row i's reward, normalised within the group as in `grpo`, and the sum whitened over all valid
tokens of the batch: Liu et al. 2026, "GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward
RL Optimization". Normalising the sum instead maps different combinations of components to the same advantage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.group_relative import grpo_rows
from rlflow.trainer.ppo.core_algos.group_stats import group_index
from rlflow.trainer.ppo.core_algos.outcome import option, outcome_scores, row_lengths, spread, whiten_rows
from rlflow.trainer.ppo.core_algos.registry import AdvantageEstimator, register_adv_est


def gdpo_components(components: Mapping[str, Any], config: Any, device: torch.device) -> list[tuple[float, Tensor]]:
    """(weight, values fp32 [N]) of each component that `config.gdpo_reward_keys` names, in its order.

    Raises:
        ValueError: no keys, a key that no reward has, a row without a number, or weights that do not match the keys.
    """
    keys = list(option(config, "gdpo_reward_keys") or [])
    known = ", ".join(sorted(components)) or "none"
    if not keys:
        raise ValueError(
            "gdpo adds up reward components, and algorithm.gdpo_reward_keys names none. Set it to a list of names that "
            f"the reward function returns beside the score, e.g. [accuracy, format] (returned here: {known})."
        )
    missing = [key for key in keys if key not in components]
    if missing:
        raise ValueError(
            f"algorithm.gdpo_reward_keys={keys}: no reward has {', '.join(missing)} (returned here: {known}). The "
            "reward function must return them for every sample, in a dict beside `score`."
        )
    weights = option(config, "gdpo_reward_weights")
    weights = [1.0] * len(keys) if weights is None else [float(weight) for weight in weights]
    if len(weights) != len(keys):
        raise ValueError(
            f"algorithm.gdpo_reward_weights has {len(weights)} numbers for the {len(keys)} names in "
            "algorithm.gdpo_reward_keys; give one for each, or null for 1 each"
        )
    # Columns of a batch may be arrays of objects.
    values = [torch.as_tensor(np.asarray(components[key], dtype=np.float32), device=device) for key in keys]
    for key, value in zip(keys, values, strict=True):
        if not value.isfinite().all():
            raise ValueError(
                f"algorithm.gdpo_reward_keys={keys}: {int((~value.isfinite()).sum())} of {value.numel()} rewards have "
                f"no finite {key}. The reward function must return a number for every sample."
            )
    return list(zip(weights, values, strict=True))


def gdpo_rows(
    scores: Tensor,
    group: Tensor,
    lengths: Tensor,
    *,
    config: Any = None,
    components: Mapping[str, Any] | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    **kwargs: Any,
) -> Tensor:
    """GDPO on one value a row and component.

    Args:
        scores: [N] float, the only component when `components` is None.
        group: int64 [N].
        lengths: [N] valid tokens.
        config: `gdpo_reward_keys`, `gdpo_reward_weights` (default 1 each).
        components: numbers [N] by name.
        epsilon, norm_adv_by_std_in_grpo: as in `grpo`.

    Returns:
        advantages [N].
    """
    parts = [(1.0, scores)] if components is None else gdpo_components(components, config, scores.device)
    total = torch.zeros_like(scores)
    for weight, values in parts:
        normalised = grpo_rows(values, group, lengths, epsilon=epsilon, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)
        total = total + weight * normalised
    return whiten_rows(total, lengths)


@register_adv_est(AdvantageEstimator.GDPO, outcome=gdpo_rows)
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    batch: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """GDPO.

    Args:
        token_level_rewards: [B, T] rewards; the only component when config or `non_tensor_batch` is None.
        response_mask: [B, T], 1 = model token.
        index: [B] uid of each row's prompt.
        epsilon, norm_adv_by_std_in_grpo: as in `grpo`.
        config: `gdpo_reward_keys`, `gdpo_reward_weights` (default 1 each).
        non_tensor_batch: columns by name, among them the components.
        batch: not read: which token carries a component changes nothing.

    Returns:
        (advantages [B, T], the same tensor as returns).

    Raises:
        ValueError: no keys, a key that is no column, or a wrong number of weights.
    """
    scores = outcome_scores(token_level_rewards)
    rows = gdpo_rows(
        scores,
        group_index(index, scores.device),
        row_lengths(response_mask),
        config=config,
        components=None if config is None else non_tensor_batch,
        epsilon=epsilon,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
    )
    return spread(rows, response_mask)
