"""Every rule by which the numbers of a step's iterations become the numbers of the step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.trainer.ppo.metrics_aggregator import MetricsAggregator
from rlflow.utils.metric import Metric

NAN = float("nan")


def combined(*iterations: tuple[dict[str, Any], int]) -> dict[str, float]:
    aggregator = MetricsAggregator()
    for metrics, rows in iterations:
        aggregator.add_step_metrics(metrics, sample_count=rows)
    return aggregator.get_aggregated_metrics()


def of_one(name: str, *values: Any, rows: tuple[int, ...] = (1, 3)) -> float:
    return combined(*(({name: value}, count) for value, count in zip(values, rows, strict=True)))[name]


@pytest.mark.parametrize(
    "name",
    [
        "training/off_policy/evicted_samples",
        "training/filter_groups/evicted_samples",
        "training/filter_groups/discarded_surplus_samples",
        "training/rollout_failure/evicted_samples",
        "training/rollout_failure/groups",
        "training/reward/invalid",
        "timing_s/gen",
        "timing_s/max_wait",
        "timing_per_token_ms/update_actor",
        "perf/total_num_tokens",
        "my/loss_sum",
        "my/total",
    ],
)
def test_counts_and_times_add_up(name: str) -> None:
    assert of_one(name, 2.0, 5.0) == 7.0


@pytest.mark.parametrize(
    "name",
    [
        "training/global_step",
        "training/epoch",
        "training/rollout_probs_diff_valid",
        "lr",
        "actor/lr",
        "my/head_lr",
        "weight_sync/version",
    ],
)
def test_states_keep_the_last_value(name: str) -> None:
    assert of_one(name, 2.0, 1.0) == 1.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("critic/score/max", 5.0),
        ("critic/score/min", 2.0),
        ("training/rollout_probs_diff_max", 5.0),
        ("global_seqlen/balanced_max", 5.0),
        ("global_seqlen/balanced_min", 2.0),
        ("actor/perf/max_memory_allocated_gb", 5.0),
        ("rollout_corr/rollout_is_seq_max_deviation", 5.0),
        ("rollout_corr/rollout_rs_token_k1_min", 2.0),
        ("my/reward_max", 5.0),
        ("min", 2.0),
    ],
)
def test_extremes_stay_extremes(name: str, expected: float) -> None:
    assert of_one(name, 5.0, 2.0) == of_one(name, 2.0, 5.0) == expected


@pytest.mark.parametrize(
    "name",
    [
        "critic/score/mean",
        "actor/entropy",
        "training/rollout_probs_diff_std",
        # Words that hold "min", "max", "sum", "total" or "lr" somewhere.
        "reward_extra/domain/mean",
        "actor/minus",
        "my/maximal_share",
        "my/consumption",
        "my/totality",
        "my/alright",
        "rollout_corr/rollout_rs_seq_max_k2_mean",
    ],
)
def test_everything_else_is_a_mean_by_rows(name: str) -> None:
    assert of_one(name, 1.0, 5.0) == 4.0


def test_the_type_goes_before_the_name() -> None:
    first, second = Metric("mean", 2.0, weight=1), Metric("mean", 8.0, weight=5)
    assert of_one("timing_s/max", first, second) == 7.0, "by its own weights, not by rows"
    assert first.values == [2.0], "what was given stays as it is"
    assert of_one("actor/lr", Metric("sum", 1.0), Metric("sum", 2.0)) == 3.0
    assert of_one("my/mean", Metric("last", 1.0), Metric("last", 2.0)) == 2.0


def test_a_name_cannot_change_its_kind() -> None:
    aggregator = MetricsAggregator()
    aggregator.add_step_metrics({"a": Metric("sum", 1.0)}, 1)
    with pytest.raises(ValueError, match="'a' changed its kind"):
        aggregator.add_step_metrics({"a": 1.0}, 1)


def test_the_range_of_loads_is_recomputed() -> None:
    loads = combined(
        ({"global_seqlen/min": 10, "global_seqlen/max": 14, "global_seqlen/minmax_diff": 4}, 1),
        ({"global_seqlen/min": 20, "global_seqlen/max": 21, "global_seqlen/minmax_diff": 1}, 1),
    )
    assert loads["global_seqlen/minmax_diff"] == 11
    assert of_one("global_seqlen/minmax_diff", 4, 1) == 1.75, "alone it is an ordinary number"


def test_staleness_of_evicted_samples_is_weighted_by_their_number() -> None:
    prefix = "training/off_policy/evicted_samples"
    found = combined(
        ({prefix: 1, f"{prefix}_staleness/mean": 9.0, f"{prefix}_staleness/max": 9.0}, 100),
        ({}, 100),
        ({prefix: 3, f"{prefix}_staleness/mean": 5.0, f"{prefix}_staleness/max": 7.0}, 1),
    )
    assert found == {prefix: 4, f"{prefix}_staleness/mean": 6.0, f"{prefix}_staleness/max": 9.0}


def test_what_is_no_number_is_left_out() -> None:
    given = {"a": True, "b": np.bool_(False), "c": "text", "d": [1.0, 2.0], "e": torch.zeros(2), "f": None, "g": {}}
    scalars = {"h": torch.tensor(2.0), "i": np.float32(3.0), "j": torch.tensor([4])}
    assert combined(({**given, **scalars}, 2)) == {"h": 2.0, "i": 3.0, "j": 4.0}


def test_an_iteration_without_a_measurement_leaves_the_others_alone() -> None:
    for name, expected in (("critic/score/mean", 2.0), ("critic/score/max", 2.0), ("timing_s/gen", 2.0)):
        assert of_one(name, NAN, 2.0) == of_one(name, 2.0, NAN) == expected
        assert math.isnan(of_one(name, NAN, NAN))
    assert of_one("critic/score/max", float("inf"), 1.0) == float("inf")


def test_rows_that_are_not_there_weigh_nothing() -> None:
    assert of_one("actor/entropy", 1.0, 3.0, rows=(0, 2)) == 3.0
    assert math.isnan(of_one("actor/entropy", 1.0, 3.0, rows=(0, 0)))
    with pytest.raises(ValueError, match="sample_count=-1"):
        MetricsAggregator().add_step_metrics({}, -1)


def test_one_iteration_stays_as_it_is_and_reset_forgets() -> None:
    metrics = {"critic/score/mean": 0.5, "timing_s/step": 2.0, "training/global_step": 7, "my/x": -1.0}
    aggregator = MetricsAggregator()
    aggregator.add_step_metrics(metrics, 8)
    assert aggregator.get_aggregated_metrics() == metrics
    aggregator.reset()
    assert aggregator.get_aggregated_metrics() == {}
