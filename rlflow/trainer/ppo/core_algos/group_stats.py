"""Statistics of the sessions of one prompt, for every group estimator.

One segment reduction over all rows (`rlflow.utils.groupwise`); no Python loop over rows or groups. Sums run in fp64 and
deviations are taken there, before anything is rounded: a group of equal scores has deviations of exactly 0, so that
dividing by std + eps has no noise to amplify.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.utils.groupwise import GroupNames, factorise, segment_moments, segment_sum


@dataclass(frozen=True)
class GroupStats:
    """Per-row statistics of the row's group; all [N], fp32 (fp64 for fp64 scores).

    Fields:
        group: int64 numbers 0 .. G - 1.
        mean: mean score of the group.
        std: sample standard deviation (n - 1), 0 for n = 1.
        count: rows of the group.
        centred: score - mean, exact where both are large.
    """

    group: Tensor
    mean: Tensor
    std: Tensor
    count: Tensor
    centred: Tensor

    @property
    def alone(self) -> Tensor:
        """Bool [N]: the row is the only one of its group."""
        return self.count <= 1


def group_index(index: GroupNames, device: torch.device | None = None) -> Tensor:
    """Group numbers 0 .. G - 1, int64 [N], from names (uids) or numbers; rows of a group need not be adjacent."""
    if isinstance(index, Tensor):
        return torch.unique(index.to(device), return_inverse=True)[1].reshape(-1)
    return torch.as_tensor(factorise(index), device=device)


def group_count(group: Tensor) -> int:
    """Number of groups of `group_index`."""
    return int(group.max()) + 1 if group.numel() else 0


def group_sum(values: Tensor, group: Tensor) -> Tensor:
    """Sum over the row's group in fp64, for each row: values [N, ...] -> [N, ...]."""
    return segment_sum(values.double(), group, group_count(group))[group]


def group_stats(scores: Tensor, index: GroupNames) -> GroupStats:
    """Mean, sample standard deviation and size of each row's group.

    Args:
        scores: [N] float, one score a row.
        index: group of each row: names, or numbers (int64 [N]).
    """
    group = group_index(index, scores.device)
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    moments = segment_moments(scores, group, group_count(group))
    mean = moments.mean[group]
    return GroupStats(
        group=group,
        mean=mean.to(dtype),
        std=moments.variance.sqrt()[group].to(dtype),
        count=moments.count[group].to(dtype),
        centred=(scores.double() - mean).to(dtype),
    )
