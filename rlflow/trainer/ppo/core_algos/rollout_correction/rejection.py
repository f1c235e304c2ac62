"""Rejection: tokens or rows whose policies differ too much leave the loss.

u = log pi_train - log pi_rollout, |u| <= 20
k1 = -u          k2 = u^2 / 2          k3 = exp(u) - 1 - u                 Schulman 2020, "Approximating KL divergence"
token_k*         keep a token by its own statistic
seq_sum_k*, seq_mean_k*, seq_max_k*    keep a row by the sum, mean or maximum over its tokens
k1 is kept when log(lower) <= k1 <= log(upper), k2 and k3 when they are at most the bound; with several options all
must keep a token. `seq_mean_k1` bounds the geometric mean of the row's ratios.

Invariant: NaN at a valid token is no reason to reject it, nor its row: it would disappear from the loss unseen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.aggregate import masked_sum
from rlflow.trainer.ppo.core_algos.rollout_correction.cells import Cells, Readings, sample_std, share, spread
from rlflow.trainer.ppo.core_algos.rollout_correction.thresholds import Bounds, parse_rs_options, parse_rs_thresholds
from rlflow.trainer.ppo.core_algos.valid import LOG_RATIO_BOUND
from rlflow.utils.metric import Metric


@torch.no_grad()
def rejection(
    log_ratio: Tensor, cells: Cells, rollout_rs: str, rollout_rs_threshold: Any
) -> tuple[Tensor, dict[str, Metric]]:
    """The tokens to keep (bool [B, T], false outside the mask) and metrics `rollout_rs_*`.

    Args:
        log_ratio: u [B, T], zero outside the mask.
        cells: the valid tokens.
        rollout_rs: option names, separated by commas.
        rollout_rs_threshold: their bounds, see `thresholds`.
    """
    options = parse_rs_options(rollout_rs)
    bounds = parse_rs_thresholds(options, rollout_rs_threshold)
    keep = cells.mask.clone()
    if not cells.tokens:
        return keep, {}
    readings = Readings(cells)
    for option, limits in zip(options, bounds, strict=True):
        statistic = _statistic(option, log_ratio, cells)
        rejected = statistic > limits.upper
        if limits.lower is not None:
            rejected |= statistic < limits.lower
        kept = cells.mask & ~rejected
        _read(readings, option, statistic, kept, limits)
        keep &= kept
    _read_masked(readings, "rollout_rs_", keep)
    return keep, readings.metrics()


def _statistic(option: str, log_ratio: Tensor, cells: Cells) -> Tensor:
    """The statistic that decides about each token, [B, T]; constant along a row for seq_*."""
    level, estimator = option.rsplit("_", 1)
    u = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    tokens = {"k1": lambda: -u, "k2": lambda: 0.5 * u.square(), "k3": lambda: u.exp() - 1 - u}[estimator]()
    if level == "token":
        return tokens
    if level == "seq_max":
        rows = tokens.masked_fill(~cells.mask, -torch.inf).amax(dim=-1)
    else:
        rows = masked_sum(tokens, cells.mask, axis=-1)
        if level == "seq_mean":
            rows = rows / cells.mask.sum(dim=-1).clamp(min=1)
    return torch.where(cells.is_row, rows, torch.zeros_like(rows)).unsqueeze(-1).expand_as(tokens)


def _read(readings: Readings, option: str, statistic: Tensor, kept: Tensor, limits: Bounds) -> None:
    """Metrics of one option. Fractions are of tokens for token_*, of rows for seq_*; k1 is compared in logs."""
    cells, name = readings.cells, f"rollout_rs_{option}_"
    tokens, rows = cells.of_tokens(statistic), cells.row_means(statistic)
    decided = tokens if option.startswith("token") else rows
    mean = readings.token_mean if option.startswith("token") else readings.row_mean
    below = torch.zeros_like(decided, dtype=torch.bool) if limits.lower is None else decided < limits.lower
    readings.token_mean(f"{name}mean", tokens.mean())
    readings.highest(f"{name}max", tokens.max())
    readings.lowest(f"{name}min", tokens.min())
    mean(f"{name}fraction_high", share(decided > limits.upper))
    mean(f"{name}fraction_low", share(below))
    readings.token_mean(f"{name}std", spread(tokens, 0.0 if limits.lower is None else limits.lower, limits.upper))
    readings.row_mean(f"{name}seq_mean", rows.mean())
    readings.row_mean(f"{name}seq_std", sample_std(rows))
    readings.highest(f"{name}seq_max", rows.max())
    readings.lowest(f"{name}seq_min", rows.min())
    readings.highest(f"{name}seq_max_deviation", rows.abs().max())
    readings.row_mean(f"{name}seq_fraction_high", share(rows > limits.upper))
    if limits.lower is not None:
        readings.row_mean(f"{name}seq_fraction_low", share(rows < limits.lower))
    _read_masked(readings, name, kept)


def _read_masked(readings: Readings, name: str, kept: Tensor) -> None:
    """Share of tokens that are dropped, and of rows that lose at least one."""
    cells = readings.cells
    readings.token_mean(f"{name}masked_fraction", share(~cells.of_tokens(kept)))
    readings.row_mean(f"{name}seq_masked_fraction", share(cells.of_rows((~kept & cells.mask).any(dim=-1))))
