"""Rewards to advantages, on the controller.

The estimators are those of `core_algos`; this file spreads jagged rows to [B, T], decides which rows form a group, and
brings the result back to the rows' own lengths.

    invalid rows     (a reward without a result) have mask 0 and leave their group, so that they move no statistic
    padding rows     likewise
    several outputs  of one session: with grpo only the last enters the group; its value goes to all rows of the session
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo import core_algos
from rlflow.trainer.ppo.core_algos.aggregate import masked_mean
from rlflow.trainer.ppo.replay_buffer import final_outputs, session_of
from rlflow.utils.errors import ContractError
from rlflow.utils.nested import nested_lengths, nested_to_padded, padded_to_nested

OPTIONAL_FIELDS = ("old_log_probs", "ref_log_prob", "rollout_log_probs", "values")


def to_dense(data: Any) -> dict[str, Tensor]:
    """Response-aligned fields of the batch as [B, T], T = the longest response."""
    return {
        name: nested_to_padded(data[name]).float()
        for name in ("rm_scores", "response_mask", *OPTIONAL_FIELDS)
        if name in data.keys()  # noqa: SIM118 - a TensorDict iterates over rows
    }


def apply_kl_penalty(dense: dict[str, Tensor], controller: Any, estimator: str) -> tuple[Tensor, dict[str, float]]:
    """Subtract beta x KL(old || ref) from the score of each token.

    Returns the token-level rewards [B, T] and the metrics; the controller adapts after its value was used.
    """
    mask = dense["response_mask"]
    kl = core_algos.kl_penalty(dense["old_log_probs"], dense["ref_log_prob"], estimator) * mask
    beta = controller.value
    current = masked_mean(kl, mask, axis=-1).mean().item()
    controller.update(current, n_steps=mask.shape[0])
    rewards = dense["rm_scores"] - beta * kl
    return rewards, {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": beta}


def group_names(keys: list[str], mask: Tensor) -> list[str]:
    """The group of each row: its prompt, or itself when it has no valid token."""
    valid = (mask.sum(dim=-1) > 0).tolist()
    return [session_of(key)[0] if ok else f"alone:{key}" for key, ok in zip(keys, valid, strict=True)]


def compute_advantage(keys: list[str], rewards: Tensor, dense: dict[str, Tensor], config: Any) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T] of the batch by `algorithm.adv_estimator`.

    Args:
        keys: trajectory keys `{uid}_{session}_{index}`, one a row.
        rewards: token-level rewards [B, T].
        dense: the response-aligned fields, at least `response_mask`.
        config: the `algorithm` node.
    """
    mask = dense["response_mask"]
    estimator = core_algos.get_adv_estimator_fn(config.adv_estimator)
    finals = final_outputs(keys) if config.adv_estimator == "grpo" else list(range(len(keys)))
    rows = torch.tensor(finals)
    fields: dict[str, Any] = {name: dense[name][rows] for name in OPTIONAL_FIELDS if name in dense}
    if config.adv_estimator == "grpo":
        fields["norm_adv_by_std_in_grpo"] = config.norm_adv_by_std_in_grpo
    if config.adv_estimator == "gae":
        if "values" not in fields:
            raise ContractError("adv_estimator=gae reads values, but no critic wrote them for every row of the batch")
        fields |= {"gamma": config.gamma, "lam": config.lam}
    advantages, returns = estimator(
        token_level_rewards=rewards[rows],
        response_mask=mask[rows],
        index=_as_objects(group_names([keys[i] for i in finals], mask[rows])),
        config=config,
        **fields,
    )
    if len(finals) == len(keys):
        return advantages, returns
    spread = _spread_over_session(keys, finals, advantages, mask)
    return spread, spread


def _as_objects(names: list[str]) -> Any:
    import numpy as np

    return np.array(names, dtype=object)


def _spread_over_session(keys: list[str], finals: list[int], advantages: Tensor, mask: Tensor) -> Tensor:
    """Give the final row's value (at its first valid token) to every row of its session."""
    first = mask[torch.tensor(finals)].argmax(dim=-1)
    value = advantages.gather(1, first.unsqueeze(1)).squeeze(1)
    row_of = {session_of(keys[row])[:2]: position for position, row in enumerate(finals)}
    positions = torch.tensor([row_of[session_of(key)[:2]] for key in keys])
    return value[positions].unsqueeze(1) * mask


def to_jagged(dense: Tensor, like: Tensor) -> Tensor:
    """Rows [B, T] back to the lengths of a jagged field."""
    return padded_to_nested(dense, nested_lengths(like))
