"""Rollout correction under the names of the reference: keyword options in, plain numbers out.

The maths is `rlflow.trainer.ppo.core_algos.rollout_correction`, the meaning of the options `thresholds` there.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from rlflow.trainer.ppo.core_algos.rollout_correction import PREFIX, compute_rollout_correction
from rlflow.trainer.ppo.core_algos.rollout_correction.cells import Cells
from rlflow.trainer.ppo.core_algos.rollout_correction.metrics import offpolicy_metrics
from rlflow.trainer.ppo.core_algos.rollout_correction.rejection import rejection
from rlflow.trainer.ppo.core_algos.rollout_correction.weights import importance_weights
from rlflow.trainer.ppo.core_algos.valid import LOG_PROB_FLOOR, LOG_RATIO_BOUND, only_valid, valid_log_prob
from rlflow.utils.metric import Metric

SAFETY_BOUND = LOG_RATIO_BOUND


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> tuple[TensorDict | None, Tensor, dict[str, float]]:
    """Weights, mask and metrics of a batch; all tensors [B, T].

    Returns:
        A `TensorDict` with `rollout_is_weights` (None when rollout_is is not set), the mask after rejection, and
        metrics `rollout_corr/*`.

    Raises:
        ValueError: shapes that differ, no valid token, an unknown option or a bound that cannot be read.
        TypeError: a bound that is neither number nor string.
    """
    _refuse_empty(response_mask)
    options = {
        "rollout_is": rollout_is,
        "rollout_is_threshold": rollout_is_threshold,
        "rollout_is_batch_normalize": rollout_is_batch_normalize,
        "rollout_rs": rollout_rs,
        "rollout_rs_threshold": rollout_rs_threshold,
    }
    weights, mask, metrics = compute_rollout_correction(old_log_prob, rollout_log_prob, response_mask, options)
    batch = None
    if weights is not None:
        batch = TensorDict({"rollout_is_weights": weights}, batch_size=weights.shape[:1])
    return batch, mask, _numbers(metrics)


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Weights [B, T] of log ratios [B, T] (training - rollout), and metrics `rollout_is_*`; ValueError: empty mask."""
    _refuse_empty(response_mask)
    weights, metrics = importance_weights(
        _bounded(log_ratio, response_mask),
        Cells(response_mask),
        rollout_is,
        rollout_is_threshold,
        rollout_is_batch_normalize,
    )
    return weights, _numbers(metrics)


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: float | str | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The mask after rejection, in the dtype of `response_mask`, and metrics `rollout_rs_*`."""
    keep, metrics = rejection(
        _bounded(log_ratio, response_mask), Cells(response_mask), rollout_rs, rollout_rs_threshold
    )
    return response_mask * keep.to(response_mask.dtype), _numbers(metrics)


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """How far the two policies are apart, without prefix; ValueError when no token is valid."""
    _refuse_empty(response_mask)
    rollout = None if rollout_log_prob is None else valid_log_prob(rollout_log_prob, response_mask)
    return _numbers(offpolicy_metrics(valid_log_prob(old_log_prob, response_mask), rollout, Cells(response_mask)))


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """`compute_offpolicy_metrics` with the prefix `rollout_corr/`."""
    metrics = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask)
    return {f"{PREFIX}{name}": value for name, value in metrics.items()}


def _bounded(log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    # Rows are summed, so an infinite ratio must become the largest difference that two log-probs can have.
    return only_valid(log_ratio, response_mask).clamp(LOG_PROB_FLOOR, -LOG_PROB_FLOOR)


def _refuse_empty(response_mask: Tensor) -> None:
    if not bool(torch.any(response_mask != 0)):
        raise ValueError("response_mask has no valid token, so there is nothing to correct")


def _numbers(metrics: dict[str, Metric]) -> dict[str, float]:
    return {name: metric.aggregate() for name, metric in metrics.items()}
