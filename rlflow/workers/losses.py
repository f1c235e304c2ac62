"""Losses that the engines call, once per micro-batch.

Contract: `loss_function(model_output=, data=, dp_group=) -> (scalar, metrics)`. `data` carries `batch_num_tokens`,
`global_batch_size` and `dp_size` of the whole mini-batch over all ranks, so that

    sum over micro-batches of (local sum / global count x dp_size), averaged over ranks,

is the exact mean of the mini-batch for any split. The counts must be those of the mask that the loss uses: after a
rejection the trainer writes `loss_mask` with `response_mask`, so that surviving tokens are counted. Metrics are
`Metric`s: a mean carries the tokens it averages over, a partial loss is a sum (`Metric.aggregate_dp` divides by the
ranks what dp_size multiplied).

Values outside the mask, NaN too, reach neither loss nor gradient: every term replaces them on the way in.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rlflow.trainer.ppo.core_algos import compute_value_loss, get_policy_loss_fn
from rlflow.trainer.ppo.core_algos.aggregate import agg_loss, masked_mean
from rlflow.trainer.ppo.core_algos.kl import kl_penalty
from rlflow.trainer.ppo.core_algos.valid import only_valid
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError
from rlflow.utils.metric import AggregationType, Metric, as_number


def response_field(data: TensorDict, name: str, lengths: Tensor) -> Tensor:
    """The response-aligned field `name` as dense [B, R], zeros behind each row.

    Raises:
        ContractError: the field is missing, or its rows do not line up with `responses`.
    """
    if name not in data.keys():
        raise ContractError(f"the loss needs {name}, but the batch has only {sorted(data.keys())}")
    field = data[name]
    width = int(lengths.max()) if lengths.numel() else 0
    if not tu.is_nested(field):
        if field.shape[1] != width or bool((lengths != width).any()):
            raise ContractError(f"{name} is dense {tuple(field.shape)}, the responses have lengths up to {width}")
        return field
    if not torch.equal(tu.nested_lengths(field).to(lengths.device), lengths):
        raise ContractError(f"rows of {name} do not line up with the responses they belong to")
    return tu.nested_to_padded(field, width=width)


def ppo_loss(
    config: Any, model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[Tensor, dict[str, Any]]:
    """Policy loss - entropy_coeff x entropy + kl_loss_coef x KL to the reference.

    Args:
        config: actor config (`policy_loss.loss_mode` names the loss).
        model_output: jagged `log_probs` [B, j] fp32 with gradient, optional `entropy`.
        data: `response_mask`, `old_log_probs`, `advantages`, optional `rollout_is_weights`, with `use_kl_loss` also
            `ref_log_prob`; all response-aligned.
        dp_group: unused; part of the contract.

    Returns:
        The scalar and `actor/pg_loss`, the policy loss's own metrics, and where they are on `actor/entropy_loss`,
        `kl_loss`, `kl_coef`.
    """
    lengths = tu.nested_lengths(model_output["log_probs"])
    log_prob = tu.nested_to_padded(model_output["log_probs"])
    mask = response_field(data, "response_mask", lengths).to(log_prob.device).bool()
    counts = _counts(config, data)
    weights = None
    if "rollout_is_weights" in data.keys():
        weights = response_field(data, "rollout_is_weights", lengths)
    # The policy has not moved since the rollout's batch was complete: what it says now is what it said then.
    fused = "old_log_probs" not in data.keys() and tu.get(data, "fuse_old_log_prob", False)
    name = config.policy_loss.loss_mode
    result = get_policy_loss_fn(name)(
        old_log_prob=log_prob.detach() if fused else response_field(data, "old_log_probs", lengths),
        log_prob=log_prob,
        advantages=response_field(data, "advantages", lengths),
        response_mask=mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config_with_counts(config, counts),
        rollout_is_weights=weights,
    )
    pg_loss, metrics = checked_result(name, result, tokens=float(mask.sum()))
    metrics["actor/pg_loss"] = Metric(AggregationType.SUM, pg_loss)
    loss = pg_loss
    if "entropy" in model_output:
        entropy_mat = only_valid(tu.nested_to_padded(model_output["entropy"]), mask)
        entropy = agg_loss(entropy_mat, mask, config.loss_agg_mode, **counts)
        metrics["actor/entropy_loss"] = Metric(AggregationType.SUM, entropy)
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * entropy
    if config.use_kl_loss:
        reference = only_valid(response_field(data, "ref_log_prob", lengths), mask)
        kld = kl_penalty(only_valid(log_prob, mask), reference, config.kl_loss_type)
        kl_loss = agg_loss(kld, mask, config.loss_agg_mode, **counts)
        metrics["kl_loss"] = Metric(AggregationType.SUM, kl_loss)
        metrics["kl_coef"] = Metric(AggregationType.MEAN, config.kl_loss_coef)
        loss = loss + config.kl_loss_coef * kl_loss
    return loss, metrics


def checked_result(name: str, result: Any, tokens: float) -> tuple[Tensor, dict[str, Any]]:
    """What the policy loss `name` returned, its metrics typed: a plain number is a mean over `tokens`.

    Raises:
        ContractError: it is no (scalar tensor, dict of metrics); the text names the loss, and the metric.
    """
    good = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    if not (good and isinstance(result[0], Tensor) and result[0].numel() == 1):
        raise ContractError(
            f"policy loss {name} returned {_kind(result)}, which is no (scalar tensor, dict of metrics). Try: "
            "return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}"
        )
    loss, given = result
    metrics: dict[str, Any] = {}
    for key, value in given.items():
        if isinstance(value, Metric):
            metrics[key] = value
        elif as_number(value) is None:
            raise ContractError(
                f"policy loss {name}: its metric {key} is {_kind(value)}, and a metric is one number. Try: its mean "
                "over the valid tokens, or a rlflow.utils.metric.Metric"
            )
        else:
            metrics[key] = Metric(AggregationType.MEAN, value, weight=tokens)
    return loss, metrics


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_kind, value))})"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def value_loss(
    config: Any, model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[Tensor, dict[str, Any]]:
    """Clipped squared error of the critic's values.

    Args:
        config: critic config (`cliprange_value`, `loss_agg_mode`, `loss_scale_factor`).
        model_output: jagged `values` [B, j] fp32 with gradient.
        data: `response_mask`, `values` (of the critic before the update), `returns`; all response-aligned.
        dp_group: unused; part of the contract.

    Returns:
        The scalar and `critic/vf_loss`, `critic/vf_clipfrac` (share of tokens at which the clip is active),
        `critic/vpred_mean`.
    """
    lengths = tu.nested_lengths(model_output["values"])
    vpreds = tu.nested_to_padded(model_output["values"])
    mask = response_field(data, "response_mask", lengths).to(vpreds.device).bool()
    loss, clipfrac = compute_value_loss(
        vpreds=vpreds,
        returns=response_field(data, "returns", lengths),
        values=response_field(data, "values", lengths),
        response_mask=mask,
        cliprange_value=config.cliprange_value,
        loss_agg_mode=config.loss_agg_mode,
        **_counts(config, data),
    )
    tokens = float(mask.sum())
    metrics = {
        "critic/vf_loss": Metric(AggregationType.SUM, loss),
        "critic/vf_clipfrac": Metric(AggregationType.MEAN, clipfrac, weight=tokens),
        "critic/vpred_mean": Metric(AggregationType.MEAN, masked_mean(vpreds.detach(), mask), weight=tokens),
    }
    return loss, metrics


def _counts(config: Any, data: TensorDict) -> dict[str, Any]:
    """What `agg_loss` divides by: the counts of the mini-batch on all ranks."""
    return {
        "dp_size": tu.get(data, "dp_size", 1),
        "batch_num_tokens": tu.get(data, "batch_num_tokens"),
        "global_batch_size": tu.get(data, "global_batch_size"),
        "loss_scale_factor": config.get("loss_scale_factor"),
    }


def config_with_counts(config: Any, counts: dict[str, Any]) -> Any:
    """A copy of the actor config with the `global_batch_info` that losses hand to `agg_loss`; the given one stays."""
    if isinstance(config, dict):
        return {**config, "global_batch_info": counts}
    mine = copy.copy(config)
    object.__setattr__(mine, "global_batch_info", counts)
    return mine
