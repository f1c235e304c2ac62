"""Statistics of rows that belong to groups (the sessions of one prompt), by segment reductions.

Invariant: no Python loop over rows or groups. Sums run in fp64 and the variance is centred (two passes): equal scores
have exactly that mean and variance 0, and rewards near 1e3 keep a spread that E[x^2] - E[x]^2 would lose.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

FORCE_DEVICE_ENV = "RLFLOW_FORCE_DEVICE"
# The name that users of verl know.
OLD_FORCE_DEVICE_ENV = "VERL_FORCE_DEVICE"

GroupNames = Sequence[Any] | np.ndarray | Tensor


@dataclass(frozen=True)
class SegmentMoments:
    """Per group, fp64 [G]: number of rows, mean, sample variance (n - 1; 0 for fewer than two rows)."""

    count: Tensor
    mean: Tensor
    variance: Tensor


def segment_sum(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Sums of the rows of each group: values [N, ...], group int64 [N] -> [groups, ...]."""
    return values.new_zeros(groups, *values.shape[1:]).index_add_(0, group, values)


def segment_moments(scores: Tensor, group: Tensor, groups: int) -> SegmentMoments:
    """Count, mean and sample variance of the scores [N] of each of `groups` groups (group: int64 [N])."""
    scores = scores.double()
    count = segment_sum(torch.ones_like(scores), group, groups)
    mean = segment_sum(scores, group, groups) / count.clamp(min=1)
    centred = scores - mean[group]
    variance = segment_sum(centred * centred, group, groups) / (count - 1).clamp(min=1)
    return SegmentMoments(count, mean, variance)


def factorise(index: GroupNames) -> np.ndarray:
    """Group numbers 0 .. G - 1, int64 [N], of any names; equal names have equal numbers, in the order of the names."""
    if isinstance(index, Tensor):
        index = index.cpu().numpy()
    values = np.asarray(index)
    if values.ndim == 1 and values.dtype.kind in "iufb":
        return np.unique(values, return_inverse=True)[1].astype(np.int64)
    names = values.tolist() if values.ndim == 1 and values.dtype.kind == "U" else list(map(str, index))
    # Sorting the few distinct names is what makes this fast; the rows are only looked up.
    number = {name: k for k, name in enumerate(sorted(set(names)))}
    return np.fromiter(map(number.__getitem__, names), dtype=np.int64, count=len(names))


def as_torch_index(index: GroupNames, device: torch.device | str | None = None) -> Tensor:
    """Group numbers int64 [N] on a device.

    Whole numbers (also as floats within 1e-6, or as strings) are taken as they are, gaps included; anything else is
    numbered by `factorise`.

    Args:
        index: [N] numbers or names.
        device: None: RLFLOW_FORCE_DEVICE when set, the CPU under pytest, else this process's device.
    """
    target = torch.device(_default_device() if device is None else device)
    if isinstance(index, Tensor):
        index = index.detach().cpu().numpy()
    numbers = _whole_numbers(np.asarray(index).reshape(-1))
    return torch.as_tensor(factorise(index) if numbers is None else numbers, dtype=torch.int64, device=target)


def _whole_numbers(values: np.ndarray) -> np.ndarray | None:
    """The values as int64, None when some are no whole numbers."""
    if values.dtype.kind in "iub":
        return values.astype(np.int64)
    try:
        floats = values.astype(np.float64)
    except (TypeError, ValueError):
        return None
    rounded = np.rint(floats)
    if not np.isfinite(floats).all() or (np.abs(floats - rounded) > 1e-6).any():
        return None
    # Text goes straight to int64: beyond 2^53 a float has lost digits.
    try:
        return values.astype(np.int64) if values.dtype.kind in "OUS" else rounded.astype(np.int64)
    except ValueError:
        return rounded.astype(np.int64)


def _default_device() -> str:
    forced = os.environ.get(FORCE_DEVICE_ENV) or os.environ.get(OLD_FORCE_DEVICE_ENV)
    if forced:
        return forced
    if "pytest" in sys.modules:
        return "cpu"
    from rlflow.utils.device import get_device_name

    return get_device_name()


def group_mean_std(
    scores: Tensor, gidx: Tensor, eps: float = 1e-6, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation and size of each group.

    Args:
        scores: [N].
        gidx: int64 [N], the group of each row.
        eps: lower bound of the variance: std = sqrt(max(var, eps)), var with n - 1.
        device: where to compute; None: where the scores are.

    Returns:
        (mean, std, count), each fp32 [max(gidx) + 1]. A group of fewer than two rows has mean 0 and std 1.
    """
    target = scores.device if device is None else torch.device(device)
    scores, gidx = scores.to(target).reshape(-1), gidx.to(target).reshape(-1)
    groups = int(gidx.max()) + 1 if gidx.numel() else 0
    moments = segment_moments(scores, gidx, groups)
    several = moments.count > 1
    mean = torch.where(several, moments.mean, 0.0)
    std = torch.where(several, moments.variance.clamp(min=eps).sqrt(), 1.0)
    return mean.float(), std.float(), moments.count.float()
