"""Rewards to advantages, on the controller.

The estimators are those of `core_algos`; this file decides which rows form a group, hands each estimator what it reads
and brings the result to the rows' own lengths, jagged as the batch is.

    outcome estimators       one score a row in, one value a row out: nothing of shape [B, T] is built
    token-level, and users'  padded to [B, T], and cut back

Invariants
    invalid rows     (a reward without a result) have mask 0 and enter no group, so that they move no statistic
    padding rows     likewise
    several outputs  of one session: with an outcome estimator only the last one enters the group, with the valid tokens
                     of all outputs as its length, and its value goes to these tokens
    rewards          none is lost for lying on a token outside the mask (tool output, or rejected)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlflow.trainer.ppo import core_algos
from rlflow.trainer.ppo.core_algos import AdvantageEstimator
from rlflow.trainer.ppo.core_algos.group_stats import group_index
from rlflow.trainer.ppo.core_algos.outcome import option
from rlflow.trainer.ppo.core_algos.registry import AdvEstimatorFn, OutcomeFn
from rlflow.trainer.ppo.replay_buffer import final_outputs, uid_of
from rlflow.utils.errors import ContractError
from rlflow.utils.nested import (
    nested_lengths,
    nested_like,
    nested_row_sums,
    nested_to_padded,
    nested_values,
    padded_to_nested,
)

# Jagged fields that an estimator gets when the batch has them.
OPTIONAL_FIELDS = (
    "old_log_probs",
    "ref_log_prob",
    "rollout_log_probs",
    "values",
    "sum_pi_squared",
    "rollout_is_weights",
)
# What the built-in token-level estimators read of them; nothing else is padded for these.
_OTB_FIELDS = ("old_log_probs", "sum_pi_squared", "rollout_is_weights")
READ_FIELDS: dict[str, tuple[str, ...]] = {
    AdvantageEstimator.GAE: ("values",),
    AdvantageEstimator.REINFORCE_PLUS_PLUS: (),
    AdvantageEstimator.REMAX: (),
    AdvantageEstimator.OPTIMAL_TOKEN_BASELINE: _OTB_FIELDS,
    AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE: _OTB_FIELDS,
}
# Fields that an estimator which reads them cannot do without, and where they come from.
_SOURCES = {
    "values": "no critic wrote them for every row of the batch; leave critic.enable at null or set it to true",
    "old_log_probs": "no stage wrote them; a custom trainer must call compute_old_log_prob before",
    "sum_pi_squared": "the log-prob pass did not compute it; set actor_rollout_ref.actor.calculate_sum_pi_squared=true",
}


def needed_fields(name: str) -> tuple[str, ...]:
    """The fields that the built-in estimator `name` cannot do without."""
    return tuple(field for field in READ_FIELDS.get(name, ()) if field in _SOURCES)


def compute_advantages(
    keys: list[str],
    data: Any,
    config: Any,
    *,
    rewards: Tensor | None = None,
    reward_baselines: Tensor | Sequence[float] | None = None,
    components: Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of the batch by `algorithm.adv_estimator`.

    Args:
        keys: trajectory keys `{uid}_{session}_{index}`, one a row.
        data: TensorDict (or dict) of jagged fields [B, j]: `response_mask`, `rm_scores`, and any of `OPTIONAL_FIELDS`.
        config: the `algorithm` node.
        rewards: jagged token-level rewards, when they are not `rm_scores` (KL in the reward).
        reward_baselines: remax: the reward of the greedy response to each row's prompt, [B]; NaN in rows without one.
        components: parts of the reward, numbers [B] by name, NaN where a reward has none: for gdpo, and as
            `non_tensor_batch` for users' estimators.

    Returns:
        Jagged fp32 (advantages, returns) with the rows of `response_mask`; outcome estimators give one tensor twice.

    Raises:
        ContractError: the estimator reads something that the batch does not have; says what to set.
        ValueError: no such estimator, or its configuration or its groups cannot work.
    """
    estimator = core_algos.get_adv_estimator_fn(config.adv_estimator)
    rewards = data["rm_scores"] if rewards is None else rewards
    outcome = core_algos.get_outcome_fn(estimator)
    if outcome is not None:
        spread = _outcome_advantages(keys, rewards, data["response_mask"], config, outcome, components)
        return spread, spread
    return _token_advantages(keys, rewards, data, config, estimator, reward_baselines, components)


def _outcome_advantages(
    keys: list[str],
    rewards: Tensor,
    mask: Tensor,
    config: Any,
    outcome: OutcomeFn,
    components: Mapping[str, Any] | None,
) -> Tensor:
    scores, lengths = nested_row_sums(rewards), nested_row_sums(mask)
    group = group_index([uid_of(key) for key in keys])
    session = group_index([key.rpartition("_")[0] for key in keys])
    final = torch.tensor(final_outputs(keys), dtype=torch.int64)
    entering = final[lengths[final] > 0]
    session_lengths = lengths.new_zeros(len(final)).index_add_(0, session, lengths)[session]
    options: dict[str, Any] = {"norm_adv_by_std_in_grpo": option(config, "norm_adv_by_std_in_grpo", True)}
    if components is not None or config.adv_estimator == AdvantageEstimator.GDPO:
        columns = {name: np.asarray(values, dtype=np.float32) for name, values in (components or {}).items()}
        options["components"] = {name: torch.from_numpy(values)[entering] for name, values in columns.items()}
    values = outcome(scores[entering], group[entering], session_lengths[entering], config=config, **options)
    _refuse_shape(config.adv_estimator, "values of its outcome function", values, entering.shape)
    of_session = scores.new_zeros(len(final)).index_put_((session[entering],), values.to(scores.dtype))
    per_token = torch.repeat_interleave(of_session[session].float(), nested_lengths(mask))
    return nested_like(per_token.mul_(nested_values(mask)), mask)


def _token_advantages(
    keys: list[str],
    rewards: Tensor,
    data: Any,
    config: Any,
    estimator: AdvEstimatorFn,
    reward_baselines: Tensor | Sequence[float] | None,
    components: Mapping[str, Any] | None,
) -> tuple[Tensor, Tensor]:
    name = config.adv_estimator
    _refuse_missing_fields(name, data)
    mask = nested_to_padded(data["response_mask"]).float()
    fields: dict[str, Any] = dict(to_dense(data, READ_FIELDS.get(name, OPTIONAL_FIELDS)))
    if components is not None:
        fields["non_tensor_batch"] = {key: np.asarray(values) for key, values in components.items()}
    if reward_baselines is not None:
        fields["reward_baselines"] = torch.as_tensor(reward_baselines, dtype=torch.float32)
    if name == AdvantageEstimator.REMAX:
        _refuse_missing_baselines(keys, mask, fields.get("reward_baselines"))
    if name == AdvantageEstimator.GAE:
        fields |= {"gamma": config.gamma, "lam": config.lam}
    advantages, returns = estimator(
        token_level_rewards=rewards_on_valid_tokens(nested_to_padded(rewards).float(), mask),
        response_mask=mask,
        index=np.array(group_names(keys, mask), dtype=object),
        config=config,
        **fields,
    )
    _refuse_shape(name, "advantages", advantages, mask.shape)
    _refuse_shape(name, "returns", returns, mask.shape)
    jagged = to_jagged(advantages, data["response_mask"])
    return jagged, jagged if returns is advantages else to_jagged(returns, data["response_mask"])


def rewards_on_valid_tokens(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards [B, T] with none outside the mask [B, T]; the sum of each row stays.

    A reward outside the mask goes to the last valid token before it, else to the first one after it: a score lies on
    the last token of a response, which may be tool output, or rejected by the rollout correction, and the token-level
    estimators read rewards of valid tokens only. A row without a valid token stays as it is.
    """
    valid = mask.bool()
    moving = (((rewards != 0) & ~valid).any(dim=-1) & valid.any(dim=-1)).nonzero().flatten()
    if not moving.numel():
        return rewards
    own, valid = rewards[moving], valid[moving]
    last_before = torch.where(valid, torch.arange(valid.shape[1], device=valid.device), -1).cummax(dim=-1).values
    first = valid.int().argmax(dim=-1, keepdim=True)
    target = torch.where(last_before >= 0, last_before, first)
    return rewards.index_copy(0, moving, torch.zeros_like(own).scatter_add_(-1, target, own))


def group_names(keys: list[str], mask: Tensor) -> list[str]:
    """The group of each row: its prompt, or itself when it has no valid token."""
    valid = (mask.sum(dim=-1) > 0).tolist()
    return [uid_of(key) if ok else f"alone:{key}" for key, ok in zip(keys, valid, strict=True)]


def _refuse_shape(name: str, what: str, value: Any, expected: Sequence[int]) -> None:
    found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    if found != tuple(expected):
        raise ContractError(
            f"adv_estimator={name}: the {what} must have shape {tuple(expected)}, one for each "
            f"{'row' if len(expected) == 1 else 'token'} it was given, but have {found}; see docs/estimators.md"
        )


def _refuse_missing_fields(name: str, data: Any) -> None:
    for field in needed_fields(name):
        if field not in data.keys():  # noqa: SIM118
            raise ContractError(f"adv_estimator={name} reads {field}, but {_SOURCES[field]}")


def _refuse_missing_baselines(keys: list[str], mask: Tensor, baselines: Tensor | None) -> None:
    remedy = (
        "The trainer adds a greedy session to each prompt for it; look for failed sessions in the journal, or try "
        "algorithm.adv_estimator=rloo, which needs none."
    )
    if baselines is None:
        raise ContractError(f"adv_estimator=remax reads a reward baseline a row, but the batch has none. {remedy}")
    without = ((mask.sum(dim=-1) > 0) & ~baselines.isfinite()).nonzero().flatten().tolist()
    if without:
        raise ContractError(
            f"adv_estimator=remax: {len(without)} of {len(keys)} rows have no reward baseline, the first is "
            f"{keys[without[0]]}. {remedy}"
        )


def apply_kl_penalty(data: Any, controller: Any, estimator: str) -> tuple[Tensor, dict[str, float]]:
    """Subtract beta x KL(old || ref) from the score of each valid token.

    Args:
        data: jagged `rm_scores`, `response_mask`, `old_log_probs` and `ref_log_prob`, all with rows of equal length.
        controller: its `value` is beta; it adapts after that was used.
        estimator: a name of `core_algos.kl_penalty`.

    Returns:
        Jagged token-level rewards and the metrics. The KL is the mean, over rows with a valid token, of the row's mean
        over valid tokens (nats); these rows are also what the controller counts.
    """
    mask = data["response_mask"]
    old, ref = nested_values(data["old_log_probs"]), nested_values(data["ref_log_prob"])
    kl = torch.where(nested_values(mask).bool(), core_algos.kl_penalty(old, ref, estimator), 0.0)
    lengths = nested_row_sums(mask)
    rows = int((lengths > 0).sum())
    current = (nested_row_sums(nested_like(kl, mask)) / lengths.clamp(min=1)).sum().item() / max(rows, 1)
    beta = controller.value
    controller.update(current, n_steps=rows)
    rewards = nested_like(nested_values(data["rm_scores"]) - beta * kl, mask)
    return rewards, {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": beta}


def to_dense(data: Any, fields: Sequence[str] = ("rm_scores", "response_mask", *OPTIONAL_FIELDS)) -> dict[str, Tensor]:
    """Those of the jagged fields that the batch has, as fp32 [B, T], T = the longest response."""
    return {
        name: nested_to_padded(data[name]).float()
        for name in fields
        if name in data.keys()  # noqa: SIM118 - a TensorDict iterates over rows
    }


def to_jagged(dense: Tensor, like: Tensor) -> Tensor:
    """Rows [B, T] back to the lengths of a jagged field."""
    return padded_to_nested(dense, nested_lengths(like))
