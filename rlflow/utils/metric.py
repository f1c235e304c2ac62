"""Typed metrics: a value that knows how it is reduced.

Invariant: nothing is guessed from a metric's name. A plain number counts as a mean with weight 1.
A mean carries its weight (tokens, rows), so that the mean over micro-batches, ranks and mini-batches is the exact mean
over what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any


class AggregationType(StrEnum):
    """How values of one metric combine."""

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    LAST = "last"


def as_number(value: Any) -> float | int | None:
    """A plain int or float (possibly NaN or infinite) of a number, a bool (0 or 1), or a one-element array or tensor;
    None of anything else.
    """
    if hasattr(value, "item") and not isinstance(value, (int, float)):
        count = value.numel() if hasattr(value, "numel") else getattr(value, "size", 1)
        if count != 1:
            return None
        value = value.item()
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, (int, float)) else None


def _number(value: Any) -> float:
    number = as_number(value)
    if number is None:
        shape = getattr(value, "shape", None)
        kind = type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
        raise ValueError(f"a metric takes one number, got {kind}")
    return float(number)


class Metric:
    """Values of one quantity and their reduction.

    Args:
        aggregation: "mean" (weighted), "sum", "min", "max" or "last".
        value: optional first value: number, one-element tensor or `Metric` of the same aggregation.
        weight: weight of that value in a mean, e.g. the number of tokens it averages over.
    """

    __slots__ = ("aggregation", "values", "weights")

    def __init__(self, aggregation: str | AggregationType, value: Any = None, weight: float = 1.0) -> None:
        self.aggregation = AggregationType(aggregation)
        self.values: list[float] = []
        self.weights: list[float] = []
        if value is not None:
            self.append(value, weight)

    def append(self, value: Any, weight: float = 1.0) -> None:
        """Add one number (or all values of another `Metric`)."""
        if isinstance(value, Metric):
            self.extend(value)
            return
        self.values.append(_number(value))
        self.weights.append(float(weight))

    def extend(self, other: Metric | Iterable[Any]) -> None:
        """Add the values of another metric; ValueError when its aggregation differs."""
        if isinstance(other, Metric):
            if other.aggregation is not self.aggregation:
                raise ValueError(f"cannot merge a {other.aggregation.value} metric into a {self.aggregation.value} one")
            self.values.extend(other.values)
            self.weights.extend(other.weights)
            return
        for value in other:
            self.append(value)

    def aggregate(self) -> float:
        """The one number; NaN when there is no value, or when a value is NaN.

        A mean of total weight 0 is 0 when only zeros were reported (by micro-batches without a token), else NaN.
        """
        if not self.values:
            return float("nan")
        if self.aggregation is AggregationType.SUM:
            return sum(self.values)
        if self.aggregation in (AggregationType.MIN, AggregationType.MAX):
            # Python's min and max keep or lose a NaN depending on where it stands.
            if any(math.isnan(value) for value in self.values):
                return float("nan")
            return min(self.values) if self.aggregation is AggregationType.MIN else max(self.values)
        if self.aggregation is AggregationType.LAST:
            return self.values[-1]
        total = sum(self.weights)
        if total == 0:
            return float("nan") if any(self.values) else 0.0
        # A weight of 0 must silence its value even when that value is NaN (an empty micro-batch).
        return sum(v * w for v, w in zip(self.values, self.weights, strict=True) if w != 0) / total

    def init_list(self) -> Metric:
        """An empty metric of the same aggregation."""
        return Metric(self.aggregation)

    @staticmethod
    def from_dict(
        values: Mapping[str, Any], aggregation: str | AggregationType, weight: float = 1.0
    ) -> dict[str, Metric]:
        """Wrap every value of a dict."""
        return {name: Metric(aggregation, value, weight) for name, value in values.items()}

    @staticmethod
    def aggregate_dp(metrics: list[Metric]) -> float:
        """One number from the metrics of all data-parallel ranks (each with one entry a micro-batch).

        Sums are partial sums that were scaled by the number of ranks for the gradient average, hence mean over ranks.

        Raises:
            ValueError: no metric, metrics of different aggregations, or ranks with different numbers of entries (a
                micro-batch whose loss reported nothing would shift all later ones).
        """
        if not metrics:
            raise ValueError("aggregate_dp needs at least one metric")
        counts = [len(metric.values) for metric in metrics]
        if len(set(counts)) > 1:
            raise ValueError(f"ranks report different numbers of values: {counts}; every micro-batch must report one")
        merged = metrics[0].init_list()
        for metric in metrics:
            merged.extend(metric)
        value = merged.aggregate()
        return value / len(metrics) if merged.aggregation is AggregationType.SUM else value

    def __repr__(self) -> str:
        return f"Metric({self.aggregation.value!r}, {self.values!r})"


def merge_metrics(into: dict[str, Metric], new: Mapping[str, Any]) -> None:
    """Append every entry of `new` to the running metrics in place; plain numbers are means of weight 1."""
    for name, value in new.items():
        metric = value if isinstance(value, Metric) else Metric(AggregationType.MEAN, value)
        if name in into:
            into[name].extend(metric)
        else:
            into[name] = metric.init_list()
            into[name].extend(metric)


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers for the trackers: each `Metric` by its own aggregation, lists of numbers by their mean.

    What is no number (a table of a tracker) stays as it is.
    """
    return {name: _reduced(value) for name, value in metrics.items()}


def _reduced(value: Any) -> Any:
    if isinstance(value, Metric):
        return value.aggregate()
    if isinstance(value, (list, tuple)):
        metric = Metric(value[0].aggregation if value and isinstance(value[0], Metric) else AggregationType.MEAN)
        metric.extend(value)
        return metric.aggregate()
    number = as_number(value)
    return value if number is None else float(number)
