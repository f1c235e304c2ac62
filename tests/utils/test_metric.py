"""Typed metrics reduce by their own rule."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

from rlflow.utils.metric import AggregationType, Metric, as_number, merge_metrics, reduce_metrics

NAN = float("nan")


def test_a_mean_is_weighted_and_a_weight_of_zero_silences_nan() -> None:
    metric = Metric("mean", 1.0, weight=3)
    metric.append(5.0, weight=1)
    metric.append(float("nan"), weight=0)
    assert metric.aggregate() == 2.0
    assert math.isnan(Metric("mean").aggregate())


def test_a_mean_over_micro_batches_that_are_all_empty_is_their_zero() -> None:
    empty = Metric("mean", 0.0, weight=0)
    assert Metric.aggregate_dp([empty, empty]) == 0
    assert all(math.isnan(Metric("mean", value, weight=0).aggregate()) for value in (NAN, 1.0))


def test_the_name_decides_nothing() -> None:
    reduced = reduce_metrics({"minibatch_loss": [1.0, 3.0], "domain": Metric("sum", 2), "max": torch.tensor(4.0)})
    assert reduced == {"minibatch_loss": 2.0, "domain": 2.0, "max": 4.0}


def test_dp_sums_are_averaged_over_ranks() -> None:
    a, b = Metric("sum", 1.0), Metric("sum", 3.0)
    a.append(1.0)
    b.append(3.0)
    assert Metric.aggregate_dp([a, b]) == 4.0
    assert Metric.aggregate_dp([Metric("max", 1), Metric("max", 7)]) == 7


def test_dp_means_and_extremes_are_those_of_all_micro_batches() -> None:
    rows = np.arange(12.0).reshape(3, 4)  # ranks x micro-batches
    for kind, oracle in (("mean", rows.mean()), ("sum", rows.mean(0).sum()), ("min", 0.0), ("max", 11.0)):
        ranks = [Metric(kind) for _ in rows]
        for metric, values in zip(ranks, rows, strict=True):
            metric.extend(values.tolist())
        assert Metric.aggregate_dp(ranks) == pytest.approx(oracle), kind


def test_ranks_must_report_as_many_values_of_one_kind() -> None:
    longer = Metric("mean", 1.0)
    longer.append(2.0)
    with pytest.raises(ValueError, match=r"different numbers of values: \[2, 1\]"):
        Metric.aggregate_dp([longer, Metric("mean", 1.0)])
    with pytest.raises(ValueError, match="cannot merge a min metric into a max one"):
        Metric.aggregate_dp([Metric("max", 1.0), Metric("min", 1.0)])
    with pytest.raises(ValueError, match="at least one"):
        Metric.aggregate_dp([])


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


def test_a_metric_takes_numbers_tensors_of_one_element_and_metrics_of_its_kind() -> None:
    metric = Metric(AggregationType.SUM, torch.tensor([1.5], requires_grad=True))
    metric.append(np.float32(0.5))
    metric.append(True)
    metric.append(Metric("sum", torch.tensor(2.0, dtype=torch.bfloat16)))
    metric.extend([1, np.array([2])])
    assert metric.aggregate() == 8.0
    assert all(type(value) is float for value in metric.values)
    empty = metric.init_list()
    assert empty.aggregation is AggregationType.SUM and empty.values == [] and metric.values != []
    for value in ("1", None, np.zeros(2), torch.zeros(0)):
        with pytest.raises(ValueError, match="one number, got"):
            metric.append(value)
    with pytest.raises(ValueError, match="'median'"):
        Metric("median")


def test_from_dict_gives_every_value_the_kind_and_the_weight() -> None:
    metrics = Metric.from_dict({"a": 1.0, "b": torch.tensor(3.0)}, "mean", weight=2.0)
    metrics["a"].append(4.0, weight=1.0)
    assert {name: metric.aggregate() for name, metric in metrics.items()} == {"a": 2.0, "b": 3.0}


@pytest.mark.parametrize("values", [[NAN, 1.0, 2.0], [1.0, NAN, 2.0], [2.0, 1.0, NAN]])
@pytest.mark.parametrize("kind", ["mean", "sum", "min", "max"])
def test_nan_shows_wherever_it_stands(kind: str, values: list[float]) -> None:
    metric = Metric(kind)
    metric.extend(values)
    assert math.isnan(metric.aggregate())
    assert all(math.isnan(Metric(other).aggregate()) for other in AggregationType)


def test_a_metric_travels_between_processes() -> None:
    metric = Metric("mean", 1.0, weight=3)
    metric.append(5.0)
    copy = pickle.loads(pickle.dumps(metric))
    assert (copy.aggregation, copy.values, copy.weights) == (metric.aggregation, metric.values, metric.weights)


def test_what_is_no_number_passes_through_the_reduction() -> None:
    table = object()
    reduced = reduce_metrics({"table": table, "counts": {"0": 3}, "a": [], "b": [Metric("sum", 1), Metric("sum", 2)]})
    assert reduced["table"] is table and reduced["counts"] == {"0": 3}
    assert math.isnan(reduced["a"]) and reduced["b"] == 3
    assert as_number(np.bool_(True)) == 1 and as_number("x") is None
