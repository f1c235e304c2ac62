"""Statistics of the sessions of one prompt, for every group estimator.

One segment reduction over all rows; no Python loop over rows or groups. The variance is centred (two passes), since
rewards near 1e3 with a small spread lose everything in E[x^2] - E[x]^2 with fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupStats:
    """Per-row statistics of the row's group; all [N]. `std` is the sample standard deviation (n - 1), 0 for n = 1."""

    group: Tensor
    mean: Tensor
    std: Tensor
    count: Tensor


def group_index(index: Sequence[Any] | np.ndarray | Tensor, device: torch.device | None = None) -> Tensor:
    """Group numbers [N] int64 from group names (uids) or from numbers; rows of a group need not be adjacent."""
    if isinstance(index, Tensor):
        return index.to(device=device, dtype=torch.int64)
    _, inverse = np.unique(np.asarray([str(name) for name in index], dtype=np.str_), return_inverse=True)
    return torch.as_tensor(inverse.reshape(-1), dtype=torch.int64, device=device)


def group_stats(scores: Tensor, index: Sequence[Any] | np.ndarray | Tensor) -> GroupStats:
    """Mean, sample standard deviation and size of each row's group.

    Args:
        scores: [N] float, one score a row.
        index: group of each row, names or int64 [N].
    """
    group = group_index(index, scores.device)
    scores = scores.float()
    groups = int(group.max()) + 1 if group.numel() else 0
    zeros = torch.zeros(groups, dtype=scores.dtype, device=scores.device)
    count = zeros.scatter_add(0, group, torch.ones_like(scores))
    mean = zeros.scatter_add(0, group, scores) / count.clamp(min=1)
    centred = scores - mean[group]
    variance = zeros.scatter_add(0, group, centred * centred) / (count - 1).clamp(min=1)
    return GroupStats(group=group, mean=mean[group], std=variance.sqrt()[group], count=count[group])
