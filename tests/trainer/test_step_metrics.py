"""Numbers of a step, from rows known by their tags."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlflow.trainer.ppo import step_metrics
from rlflow.utils.nested import padded_to_nested


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
    metrics = step_metrics.step_data_metrics(dense, dense["rm_scores"], tags, limits=(5, 2))
    assert metrics["critic/score/mean"] == 1.0
    assert metrics["critic/advantages/max"] == 2.0
    assert metrics["training/reward/invalid"] == 1
    assert metrics["response_length/clip_ratio"] == 0.5 and metrics["prompt_length/clip_ratio"] == 0.5
    assert metrics["response_length/mean"] == 1.5


def test_values_say_how_much_of_the_returns_they_explain() -> None:
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    returns, values = torch.tensor([[0.0, 1.0, 2.0, 50.0]]), torch.tensor([[0.5, 1.0, 1.5, -50.0]])
    dense = {"rm_scores": returns, "response_mask": mask, "advantages": returns, "returns": returns, "values": values}
    metrics = step_metrics.step_data_metrics(dense, returns, [tag(1, 4)], limits=(5, 5))
    assert [metrics[f"critic/values/{stat}"] for stat in ("mean", "max", "min")] == [1.0, 1.5, 0.5]
    assert metrics["critic/vf_explained_var"] == pytest.approx(0.75, abs=1e-4)
    dense["response_mask"] = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    one = step_metrics.step_data_metrics(dense, returns, [tag(1, 4)], limits=(5, 5))
    assert one["critic/values/mean"] == 0.5 and math.isnan(one["critic/vf_explained_var"])


def test_log_prob_distance_is_in_probability_space_and_in_nats() -> None:
    old, rollout = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-1.0, -1.0, -9.0]])
    metrics = step_metrics.compute_log_prob_metrics(old, rollout, torch.tensor([[1, 1, 0]]))
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(math.exp(-1) - math.exp(-2), abs=1e-6)
    assert metrics["training/rollout_log_probs_diff/max"] == pytest.approx(1.0)
    empty = step_metrics.compute_log_prob_metrics(old, rollout, torch.zeros(1, 3))
    assert empty["training/rollout_probs_diff_valid"] == 0


def test_staleness_is_zero_when_the_newest_weights_were_sampled() -> None:
    metrics = step_metrics.compute_version_metrics([tag(1, 1)], step=3)
    assert metrics["training/off_policy/trajectory_staleness/mean"] == 0
    assert metrics["training/off_policy/trajectory_staleness_worst/mean"] == 1
    assert metrics["training/off_policy/trajectory_spans/mean"] == 2


def test_timers_accumulate() -> None:
    timing: dict[str, float] = {}
    for _ in range(2):
        with step_metrics.marked_timer("gen", timing):
            pass
    timing["gen"], timing["step"] = 2.0, 4.0
    metrics = step_metrics.step_timing_metrics(timing, response_tokens=1000, all_tokens=3000)
    assert metrics["timing_s/gen"] == 2.0 and metrics["timing_per_token_ms/gen"] == 2.0
    assert step_metrics.compute_throughput_metrics(timing, 3000, 3)["perf/throughput"] == 250


def batch(lengths: list[int]) -> tuple[dict[str, torch.Tensor], list[dict[str, object]]]:
    """Random dense fields of rows of these response lengths; NaN behind each row."""
    generator = torch.Generator().manual_seed(3)
    width = max(lengths, default=0)
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    names = ("rm_scores", "advantages", "returns", "values", "old_log_probs", "rollout_log_probs")
    fields = {name: -torch.rand(len(lengths), width, generator=generator) for name in names}
    for name in names[1:]:
        fields[name][~mask] = float("nan")
    fields["rm_scores"][~mask] = 0.0
    return {**fields, "response_mask": mask.long()}, [tag(4, length) for length in lengths]


def test_jagged_fields_give_the_numbers_of_dense_ones() -> None:
    fields, tags = batch([3, 0, 5])
    lengths = torch.tensor([3, 0, 5])
    jagged = {name: padded_to_nested(value, lengths) for name, value in fields.items()}
    dense = step_metrics.step_data_metrics(fields, fields["rm_scores"], tags, (4, 5))
    ragged = step_metrics.step_data_metrics(jagged, jagged["rm_scores"], tags, (4, 5))
    assert ragged == pytest.approx(dense, nan_ok=True)
    assert not any(math.isnan(value) for value in dense.values()), "what stands behind a row moves nothing"
    names = ("old_log_probs", "rollout_log_probs", "response_mask")
    distances = [step_metrics.compute_log_prob_metrics(*(kind[name] for name in names)) for kind in (fields, jagged)]
    assert distances[0] == pytest.approx(distances[1])


def test_an_empty_response_is_counted_and_scores_nothing() -> None:
    fields, tags = batch([3, 0, 5])
    metrics = step_metrics.step_data_metrics(fields, fields["rm_scores"], tags, (5, 5))
    assert metrics["critic/score/mean"] == pytest.approx(fields["rm_scores"][[0, 2]].sum().item() / 2)
    assert metrics["response/aborted_ratio"] == pytest.approx(1 / 3)
    assert metrics["response_length/min"] == 0 and metrics["response_length_non_aborted/min"] == 3
    assert metrics["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert metrics["response_length_non_aborted/clip_ratio"] == pytest.approx(1 / 2)
    assert metrics["prompt_length/clip_ratio"] == 0.0


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_nothing_to_measure_is_nan(lengths: list[int]) -> None:
    fields, tags = batch(lengths)
    metrics = step_metrics.step_data_metrics(fields, fields["rm_scores"], tags, (5, 5))
    unknown = {name for name, value in metrics.items() if math.isnan(value)}
    tokens = ("critic/score", "critic/rewards", "critic/advantages", "critic/returns", "critic/values")
    assert {f"{name}/{stat}" for name in tokens for stat in ("mean", "max", "min")} <= unknown
    assert "critic/vf_explained_var" in unknown and "response_length_non_aborted/mean" in unknown
    assert ("response/aborted_ratio" in unknown) == (lengths == [])
    assert metrics["training/reward/invalid"] == 0


def test_one_token_has_a_mean_and_no_variance() -> None:
    fields, tags = batch([1])
    metrics = step_metrics.step_data_metrics(fields, fields["rm_scores"], tags, (5, 5))
    assert metrics["critic/advantages/mean"] == metrics["critic/advantages/max"] == fields["advantages"].item()
    assert math.isnan(metrics["critic/vf_explained_var"])
    distance = step_metrics.compute_log_prob_metrics(
        fields["old_log_probs"], fields["rollout_log_probs"], fields["response_mask"]
    )
    assert distance["training/rollout_probs_diff_valid"] == 1 and distance["training/rollout_probs_diff_std"] == 0
    assert math.isnan(distance["training/rollout_actor_probs_pearson_corr"])


def test_probability_distance_against_numpy() -> None:
    fields, _ = batch([4, 6])
    names = ("old_log_probs", "rollout_log_probs", "response_mask")
    mask = fields["response_mask"].bool()
    a, b = (np.exp(fields[name][mask].numpy().astype(np.float64)) for name in names[:2])
    metrics = step_metrics.compute_log_prob_metrics(*(fields[name] for name in names))
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(np.abs(a - b).mean())
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(np.abs(a - b).max())
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(np.abs(a - b).std(ddof=1))
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(np.corrcoef(a, b)[0, 1])


def test_a_stage_without_tokens_has_no_time_a_token() -> None:
    timing = {"gen": 1.0, "ref": 2.0, "old_log_prob": 3.0}
    metrics = step_metrics.step_timing_metrics(timing, response_tokens=0, all_tokens=4)
    assert metrics == {
        "timing_s/gen": 1.0,
        "timing_s/ref": 2.0,
        "timing_s/old_log_prob": 3.0,
        "timing_per_token_ms/ref": 500.0,
    }
