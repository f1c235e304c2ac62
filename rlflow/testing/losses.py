"""The checks of `invariance` for the two kinds of losses that are called with named tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.config import FSDPActorConfig
from rlflow.testing.invariance import PROPERTIES, check_loss
from rlflow.testing.rows import random_rows
from rlflow.trainer.ppo.core_algos import PolicyLossFn, compute_value_loss, get_policy_loss_fn
from rlflow.trainer.ppo.core_algos.losses.options import option
from rlflow.utils.errors import ContractError
from rlflow.utils.metric import reduce_metrics
from rlflow.workers.losses import checked_result, config_with_counts


def check_policy_loss(
    loss: str | PolicyLossFn,
    config: Any = None,
    *,
    loss_agg_mode: str | None = None,
    properties: Sequence[str] = PROPERTIES,
    weights: bool = True,
    noise: float = 0.3,
    rows: int = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-6,
) -> None:
    """Check a policy loss for the properties of `rlflow.testing.invariance`, on random rows on the CPU.

    Args:
        loss: a registered name or a function with the signature of `register_policy_loss`.
        config: the actor config (or a dict) it is called with; None: an `FSDPActorConfig` with defaults.
        loss_agg_mode: None: that of the config.
        properties: some of `PROPERTIES`, for a loss whose definition does not allow all of them.
        weights: whether the rows have `rollout_is_weights`; False for a loss that does not read them.
        noise: standard deviation of new - old log-prob; with 0.3 about half of all tokens lie outside a clip of 0.2.
        rows: rows of the mini-batch, at least 4.
        seed: of the rows.
        dtype: float64, or float32 with a wider tolerance.
        tolerance: see `check_loss`.

    Raises:
        AssertionError: see `check_loss`; or it returned metrics that cannot be aggregated.
    """
    function = get_policy_loss_fn(loss) if isinstance(loss, str) else loss
    config = FSDPActorConfig() if config is None else config
    mode = option(config, "loss_agg_mode", "token-mean") if loss_agg_mode is None else loss_agg_mode
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", repr(loss))
    ranges = {"old_log_prob": (-3.0, -0.2), "advantages": (-2.0, 2.0)}
    if weights:
        ranges["rollout_is_weights"] = (0.3, 1.7)
    batch = random_rows(
        ranges,
        "log_prob",
        near={"log_prob": ("old_log_prob", noise)},
        weights="rollout_is_weights" if weights else None,
        rows=rows,
        seed=seed,
        dtype=dtype,
    )

    def evaluate(fields: Mapping[str, Tensor], mask: Tensor, counts: Mapping[str, Any]) -> Tensor:
        info = {**counts, "loss_scale_factor": option(config, "loss_scale_factor")}
        result = function(
            old_log_prob=fields["old_log_prob"],
            log_prob=fields["log_prob"],
            advantages=fields["advantages"],
            response_mask=mask,
            loss_agg_mode=mode,
            config=config_with_counts(config, info),
            rollout_is_weights=fields.get("rollout_is_weights"),
        )
        try:
            value, metrics = checked_result(name, result, tokens=float(mask.sum()))
            reduce_metrics(metrics)
        except (ContractError, TypeError, ValueError) as error:
            raise AssertionError(str(error)) from error
        return value

    check_loss(evaluate, batch, properties=properties, tolerance=tolerance, name=f"{name} ({mode})")


def check_value_loss(
    loss: Callable[..., tuple[Tensor, Any]] = compute_value_loss,
    *,
    cliprange_value: float = 0.5,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
    properties: Sequence[str] = PROPERTIES,
    rows: int = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-6,
) -> None:
    """The same for a value loss with the signature of `compute_value_loss`."""
    ranges = {"values": (-1.0, 1.0), "returns": (-1.0, 1.0)}
    batch = random_rows(ranges, "vpreds", near={"vpreds": ("values", 0.5)}, rows=rows, seed=seed, dtype=dtype)

    def evaluate(fields: Mapping[str, Tensor], mask: Tensor, counts: Mapping[str, Any]) -> Tensor:
        value, _ = loss(
            vpreds=fields["vpreds"],
            returns=fields["returns"],
            values=fields["values"],
            response_mask=mask,
            cliprange_value=cliprange_value,
            loss_agg_mode=loss_agg_mode,
            loss_scale_factor=loss_scale_factor,
            **counts,
        )
        return value

    name = getattr(loss, "__name__", repr(loss))
    check_loss(evaluate, batch, properties=properties, tolerance=tolerance, name=f"{name} ({loss_agg_mode})")
