"""The valid tokens and the rows that have any, and metrics over them.

Invariant: a padding row, an empty row and a masked token enter no metric, so that all numbers are the same however a
batch is padded. (The reference counts empty rows in sequence metrics: with weight 0, perplexity 1.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.aggregate import masked_sum
from rlflow.utils.metric import AggregationType, Metric


class Cells:
    """Valid positions of a mask [B, T]: `tokens` of them in `rows` rows."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask.bool()
        self.is_row = self.mask.any(dim=-1)
        self.tokens, self.rows = torch.stack([self.mask.sum(), self.is_row.sum()]).tolist()

    def of_tokens(self, values: Tensor) -> Tensor:
        """Values [B, T] (or [B, 1]) at the valid tokens, 1-D."""
        return values.expand(self.mask.shape)[self.mask]

    def of_rows(self, values: Tensor) -> Tensor:
        """Values [B] of the rows that have tokens, 1-D."""
        return values[self.is_row]

    def row_means(self, values: Tensor) -> Tensor:
        """Token mean of values [B, T] in each row that has tokens, 1-D."""
        return self.of_rows(masked_sum(values, self.mask, axis=-1) / self.mask.sum(dim=-1).clamp(min=1))


class Readings:
    """Collects scalars as typed metrics; they leave the device together in `metrics`.

    A mean over tokens (rows) weighs as many tokens (rows) when micro-batches, ranks or steps are combined.
    """

    def __init__(self, cells: Cells) -> None:
        self.cells = cells
        self._values: dict[str, Tensor] = {}
        self._kinds: dict[str, tuple[AggregationType, float]] = {}

    def token_mean(self, name: str, value: Tensor) -> None:
        """A quantity averaged over tokens."""
        self._add(name, value, AggregationType.MEAN, self.cells.tokens)

    def row_mean(self, name: str, value: Tensor) -> None:
        """A quantity averaged over rows."""
        self._add(name, value, AggregationType.MEAN, self.cells.rows)

    def highest(self, name: str, value: Tensor) -> None:
        """A maximum."""
        self._add(name, value, AggregationType.MAX, 1.0)

    def lowest(self, name: str, value: Tensor) -> None:
        """A minimum."""
        self._add(name, value, AggregationType.MIN, 1.0)

    def _add(self, name: str, value: Tensor, kind: AggregationType, weight: float) -> None:
        self._values[name] = value.detach().to(torch.float32)
        self._kinds[name] = (kind, weight)

    def metrics(self) -> dict[str, Metric]:
        """What was collected."""
        if not self._values:
            return {}
        numbers = torch.stack(list(self._values.values())).tolist()
        return {
            name: Metric(kind, number, weight)
            for (name, (kind, weight)), number in zip(self._kinds.items(), numbers, strict=True)
        }


def spread(values: Tensor, low: float, high: float) -> Tensor:
    """Population standard deviation of values cut to [low, high], 0 for one value."""
    return values.clamp(low, high).std(correction=0)


def sample_std(values: Tensor) -> Tensor:
    """Standard deviation (n - 1), 0 for one value."""
    return values.std() if values.numel() > 1 else torch.zeros_like(values.sum())


def share(condition: Tensor) -> Tensor:
    """Share of true values."""
    return condition.to(torch.float32).mean()
