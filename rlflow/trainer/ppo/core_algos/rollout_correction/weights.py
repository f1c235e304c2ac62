"""Importance weights from the rollout policy to the training policy.

u_t = log pi_train(t) - log pi_rollout(t), |u| <= 20 after summing
token      w_t = exp(u_t)                                 sequence   w_t = exp(sum of the row's u)
TIS        min(w, upper)                                  Yao et al. 2025, truncated importance sampling
IcePop     w where lower <= w <= upper, else 0            Ling team 2025, arXiv 2510.18855
batch normalise: divided by the mean weight (over tokens; for sequences over rows), so that the mean is 1
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.aggregate import masked_sum
from rlflow.trainer.ppo.core_algos.rollout_correction.cells import Cells, Readings, sample_std, share, spread
from rlflow.trainer.ppo.core_algos.rollout_correction.thresholds import IS_LEVELS, parse_is_threshold
from rlflow.trainer.ppo.core_algos.valid import LOG_RATIO_BOUND, bounded_exp
from rlflow.utils.metric import Metric

_SMALLEST_FACTOR = 1e-8


@torch.no_grad()
def importance_weights(
    log_ratio: Tensor, cells: Cells, level: str, threshold: Any, batch_normalize: bool = False
) -> tuple[Tensor, dict[str, Metric]]:
    """Weights [B, T] (0 outside the mask) and metrics `rollout_is_*`.

    Args:
        log_ratio: u [B, T], zero outside the mask.
        cells: the valid tokens.
        level: token or sequence; ValueError otherwise.
        threshold: see `parse_is_threshold`.
        batch_normalize: divide by the mean weight of this batch. Nothing is exchanged between ranks: the trainer calls
            this with the whole batch; inside a loss the batch is a micro-batch.
    """
    if level not in IS_LEVELS:
        raise ValueError(f"rollout_is={level!r} is unknown; choose from {IS_LEVELS}")
    upper, lower = parse_is_threshold(threshold)
    if level == "token":
        raw = bounded_exp(log_ratio)
    else:
        raw = bounded_exp(masked_sum(log_ratio, cells.mask, axis=-1)).unsqueeze(-1).expand_as(log_ratio)
    raw = raw * cells.mask
    inside = (raw >= (lower or 0.0)) & (raw <= upper)
    weights = raw.clamp(max=upper) if lower is None else raw * inside
    if not cells.tokens:
        return weights, {}
    readings = Readings(cells)
    _read_ratios(readings, level, log_ratio, raw, weights, upper, lower)
    _read_weights(readings, raw, weights, upper, lower)
    if lower is not None:
        readings.token_mean("rollout_is_oob_ratio", share(~cells.of_tokens(inside)))
    if batch_normalize:
        mean = cells.of_tokens(weights).mean() if level == "token" else cells.row_means(weights).mean()
        factor = torch.where(mean > _SMALLEST_FACTOR, mean, torch.ones_like(mean))
        weights = weights / factor
        readings.token_mean("rollout_is_batch_norm_factor", factor)
    return weights, readings.metrics()


def _read_ratios(
    readings: Readings, level: str, log_ratio: Tensor, raw: Tensor, weights: Tensor, upper: float, lower: float | None
) -> None:
    """How far the ratios are from 1: tokens at level token, whole rows (before any cut) at level sequence."""
    cells, floor = readings.cells, lower or 1 / upper
    if level == "token":
        ratios, applied = cells.of_tokens(raw), cells.of_tokens(weights)
        readings.highest("rollout_is_max", applied.max())
        readings.lowest("rollout_is_min", applied.min())
        readings.token_mean("rollout_is_ratio_fraction_high", share(ratios > upper))
        readings.token_mean("rollout_is_ratio_fraction_low", share(ratios < floor))
        return
    log_sums = cells.of_rows(masked_sum(log_ratio, cells.mask, axis=-1))
    readings.highest("rollout_is_max", log_sums.max().clamp(max=LOG_RATIO_BOUND).exp())
    readings.lowest("rollout_is_min", log_sums.min().clamp(max=LOG_RATIO_BOUND).exp())
    readings.row_mean("rollout_is_ratio_fraction_high", share(log_sums > math.log(upper)))
    readings.row_mean("rollout_is_ratio_fraction_low", share(log_sums < math.log(floor)))


def _read_weights(readings: Readings, raw: Tensor, weights: Tensor, upper: float, lower: float | None) -> None:
    """The weights as they are applied, over tokens and over the means of rows."""
    cells, floor = readings.cells, lower or 1 / upper
    applied = cells.of_tokens(weights)
    mean, second_moment = applied.mean(), applied.square().mean()
    readings.token_mean("rollout_is_mean", mean)
    readings.token_mean("rollout_is_std", spread(applied, 0.0, upper))
    # (sum w)^2 / (n sum w^2); weights that are all 0 represent no sample at all.
    zero = torch.zeros_like(mean)
    readings.token_mean("rollout_is_eff_sample_size", torch.where(mean > 0, mean.square() / second_moment, zero))
    rows, raw_rows = cells.row_means(weights), cells.row_means(raw)
    readings.row_mean("rollout_is_seq_mean", rows.mean())
    readings.row_mean("rollout_is_seq_std", sample_std(rows))
    readings.highest("rollout_is_seq_max", rows.max())
    readings.lowest("rollout_is_seq_min", rows.min())
    readings.highest("rollout_is_seq_max_deviation", (rows - 1).abs().max())
    readings.row_mean("rollout_is_seq_fraction_high", share(raw_rows > upper))
    readings.row_mean("rollout_is_seq_fraction_low", share(raw_rows < floor))
