"""Numbers of the iterations of one step, as the numbers of that step (for trainers with `parameter_sync_step` > 1).

How values of one name combine, first rule that applies:

    a bool, or no number            left out
    a `Metric`                      by its own aggregation and weights
    `*/minmax_diff`                 recomputed from the `max` and `min` beside it
    a plain number whose name the glossary knows     as the glossary says (rlflow/observe/glossary)
    any other plain number          by the last word of its name: `max`, `min`, `sum`, `total`, `lr` (last); else a mean

A mean of plain numbers weighs each iteration by its rows; `*/off_policy/evicted_samples_staleness/mean` by the samples
that were evicted. A plain NaN says that an iteration had nothing to measure: the others decide, and the result is NaN
only when none had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlflow.observe.glossary import reduction_of
from rlflow.utils.metric import Metric, as_number

_EVICTED_STALENESS = "/off_policy/evicted_samples_staleness/mean"
_DIFFERENCE = "/minmax_diff"


class MetricsAggregator:
    """Collects the metrics of iterations: `add_step_metrics` after each, `get_aggregated_metrics` after the last."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add_step_metrics(self, metrics: Mapping[str, Any], sample_count: int) -> None:
        """Add the metrics of one iteration.

        Args:
            metrics: name -> number or `Metric`.
            sample_count: rows of the iteration without padding.

        Raises:
            ValueError: a negative count, or a name that was another kind of `Metric` before.
        """
        if sample_count < 0:
            raise ValueError(f"sample_count={sample_count}: an iteration cannot have fewer than no rows")
        for name, value in metrics.items():
            found = _typed(name, value, _weight(name, metrics, sample_count))
            if found is None:
                continue
            try:
                self._metrics.setdefault(name, found.init_list()).extend(found)
            except ValueError as error:
                raise ValueError(f"metric {name!r} changed its kind between iterations: {error}") from error

    def get_aggregated_metrics(self) -> dict[str, float]:
        """One number a name, in the order in which the names came first."""
        numbers = {name: metric.aggregate() for name, metric in self._metrics.items()}
        for name in numbers:
            prefix = name.removesuffix(_DIFFERENCE)
            if name.endswith(_DIFFERENCE) and f"{prefix}/max" in numbers and f"{prefix}/min" in numbers:
                numbers[name] = numbers[f"{prefix}/max"] - numbers[f"{prefix}/min"]
        return numbers

    def reset(self) -> None:
        """Forget everything, for the next step."""
        self._metrics.clear()


def _typed(name: str, value: Any, weight: float) -> Metric | None:
    """The value as a `Metric`; None for what is no number."""
    if isinstance(value, Metric):
        return value
    number = None if isinstance(value, (bool, np.bool_)) else as_number(value)
    if number is None:
        return None
    return Metric(reduction_of(name), None if math.isnan(number) else number, weight)


def _weight(name: str, metrics: Mapping[str, Any], sample_count: int) -> float:
    if not name.endswith(_EVICTED_STALENESS):
        return float(sample_count)
    # Sampling reports the mean and the count together; without a count there is nothing the mean could weigh.
    return float(as_number(metrics.get(name.removesuffix("_staleness/mean"))) or 0)
