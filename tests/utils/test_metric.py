"""Typed metrics reduce by their own rule."""

from __future__ import annotations

import math

import pytest
import torch

from rlflow.utils.metric import Metric, merge_metrics, reduce_metrics


def test_a_mean_is_weighted_and_a_weight_of_zero_silences_nan() -> None:
    metric = Metric("mean", 1.0, weight=3)
    metric.append(5.0, weight=1)
    metric.append(float("nan"), weight=0)
    assert metric.aggregate() == 2.0
    assert math.isnan(Metric("mean").aggregate())


def test_the_name_decides_nothing() -> None:
    reduced = reduce_metrics({"minibatch_loss": [1.0, 3.0], "domain": Metric("sum", 2), "max": torch.tensor(4.0)})
    assert reduced == {"minibatch_loss": 2.0, "domain": 2.0, "max": 4.0}


def test_dp_sums_are_averaged_over_ranks() -> None:
    a, b = Metric("sum", 1.0), Metric("sum", 3.0)
    a.append(1.0)
    b.append(3.0)
    assert Metric.aggregate_dp([a, b]) == 4.0
    assert Metric.aggregate_dp([Metric("max", 1), Metric("max", 7)]) == 7


def test_kinds_do_not_mix_and_only_scalars_enter() -> None:
    with pytest.raises(ValueError, match="cannot merge"):
        Metric("sum", 1).extend(Metric("mean", 1))
    with pytest.raises(ValueError, match="one number"):
        Metric("mean", torch.zeros(2))


def test_merging_keeps_the_kind() -> None:
    running: dict[str, Metric] = {}
    merge_metrics(running, {"a": Metric("sum", 1), "b": 2.0})
    merge_metrics(running, {"a": Metric("sum", 2), "b": 4.0})
    assert reduce_metrics(running) == {"a": 3, "b": 3.0}
