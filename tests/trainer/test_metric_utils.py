"""Numbers of a step."""

from __future__ import annotations

import math

import pytest
import torch

from rlflow.trainer.ppo import metric_utils


def tag(prompt: int, response: int, **more: object) -> dict[str, object]:
    return {"prompt_len": prompt, "response_len": response, "min_global_steps": 1, "max_global_steps": 2, **more}


def test_masked_samples_do_not_enter_the_scores_but_are_counted() -> None:
    dense = {
        "rm_scores": torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        "response_mask": torch.tensor([[1.0, 1.0], [0.0, 0.0]]),
        "advantages": torch.tensor([[2.0, 2.0], [9.0, 9.0]]),
        "returns": torch.tensor([[2.0, 2.0], [9.0, 9.0]]),
    }
    tags = [tag(3, 2), tag(5, 1, invalid="timeout")]
    metrics = metric_utils.compute_data_metrics(dense, dense["rm_scores"], tags, limits=(5, 2))
    assert metrics["critic/score/mean"] == 1.0
    assert metrics["critic/advantages/max"] == 2.0
    assert metrics["training/reward/invalid"] == 1
    assert metrics["response_length/clip_ratio"] == 0.5 and metrics["prompt_length/clip_ratio"] == 0.5
    assert metrics["response_length/mean"] == 1.5


def test_values_say_how_much_of_the_returns_they_explain() -> None:
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    returns, values = torch.tensor([[0.0, 1.0, 2.0, 50.0]]), torch.tensor([[0.5, 1.0, 1.5, -50.0]])
    dense = {"rm_scores": returns, "response_mask": mask, "advantages": returns, "returns": returns, "values": values}
    metrics = metric_utils.compute_data_metrics(dense, returns, [tag(1, 4)], limits=(5, 5))
    assert [metrics[f"critic/values/{stat}"] for stat in ("mean", "max", "min")] == [1.0, 1.5, 0.5]
    assert metrics["critic/vf_explained_var"] == pytest.approx(0.75, abs=1e-4)
    dense["response_mask"] = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    one = metric_utils.compute_data_metrics(dense, returns, [tag(1, 4)], limits=(5, 5))
    assert one["critic/values/mean"] == 0.5 and math.isnan(one["critic/vf_explained_var"])


def test_log_prob_distance_is_in_probability_space_and_in_nats() -> None:
    old, rollout = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-1.0, -1.0, -9.0]])
    metrics = metric_utils.compute_log_prob_metrics(old, rollout, torch.tensor([[1, 1, 0]]))
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(math.exp(-1) - math.exp(-2), abs=1e-6)
    assert metrics["training/rollout_log_probs_diff/max"] == pytest.approx(1.0)
    empty = metric_utils.compute_log_prob_metrics(old, rollout, torch.zeros(1, 3))
    assert empty["training/rollout_probs_diff_valid"] == 0


def test_staleness_is_zero_when_the_newest_weights_were_sampled() -> None:
    metrics = metric_utils.compute_version_metrics([tag(1, 1)], step=3)
    assert metrics["training/off_policy/trajectory_staleness/mean"] == 0
    assert metrics["training/off_policy/trajectory_staleness_worst/mean"] == 1
    assert metrics["training/off_policy/trajectory_spans/mean"] == 2


def test_timers_accumulate() -> None:
    timing: dict[str, float] = {}
    for _ in range(2):
        with metric_utils.marked_timer("gen", timing):
            pass
    timing["gen"], timing["step"] = 2.0, 4.0
    metrics = metric_utils.compute_timing_metrics(timing, response_tokens=1000, all_tokens=3000)
    assert metrics["timing_s/gen"] == 2.0 and metrics["timing_per_token_ms/gen"] == 2.0
    assert metric_utils.compute_throughput_metrics(timing, 3000, 3)["perf/throughput"] == 250
