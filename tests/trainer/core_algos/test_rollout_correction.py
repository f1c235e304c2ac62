"""Importance weights, rejection and off-policy metrics: plain-loop oracles, bounds as users write them, edges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlflow.config import RolloutCorrectionConfig
from rlflow.trainer.ppo import rollout_corr_helper as helper
from rlflow.trainer.ppo.core_algos import compute_rollout_correction
from rlflow.trainer.ppo.core_algos.rollout_correction import (
    RS_OPTIONS,
    Bounds,
    parse_is_threshold,
    parse_rs_options,
    parse_rs_thresholds,
)
from rlflow.utils.metric import AggregationType

INF = float("inf")


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(6, 5, generator=generator, dtype=torch.float64)
    rollout = old + 0.3 * torch.randn(6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) < 0.7
    mask[0] = True
    return old, rollout, mask.long()


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name.removeprefix("rollout_corr/"): metric.aggregate() for name, metric in metrics.items()}


# --- oracles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("threshold", [1.2, "0.8_1.2"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights(level: str, threshold: Any, normalize: bool) -> None:
    old, rollout, mask = batch()
    cfg = RolloutCorrectionConfig(
        rollout_is=level, rollout_is_threshold=threshold, rollout_is_batch_normalize=normalize
    )
    weights, kept, metrics = compute_rollout_correction(old, rollout, mask, cfg)
    expected = [[0.0] * 5 for _ in range(6)]
    for i in range(6):
        tokens = [t for t in range(5) if mask[i, t]]
        for t in tokens:
            used = tokens if level == "sequence" else [t]
            ratio = math.exp(sum(float(old[i, s] - rollout[i, s]) for s in used))
            inside = 0.8 <= ratio <= 1.2
            expected[i][t] = min(ratio, 1.2) if threshold == 1.2 else ratio * inside
    valid = [(i, t) for i in range(6) for t in range(5) if mask[i, t]]
    mean = sum(expected[i][t] for i, t in valid) / len(valid)
    squares = sum(expected[i][t] ** 2 for i, t in valid) / len(valid)
    found = numbers(metrics)
    assert found["rollout_is_mean"] == pytest.approx(mean)
    assert found["rollout_is_eff_sample_size"] == pytest.approx(mean**2 / squares, rel=1e-5)
    if normalize:
        rows = [max(expected[i]) for i in range(6) if mask[i].any()]
        factor = mean if level == "token" else sum(rows) / len(rows)
        assert found["rollout_is_batch_norm_factor"] == pytest.approx(factor)
        expected = [[value / factor for value in row] for row in expected]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(kept, mask)


def statistic(option: str, u: list[float]) -> list[float]:
    level, kind = option.rsplit("_", 1)
    tokens = [{"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[kind] for x in u]
    if level == "token":
        return tokens
    whole = {"seq_sum": sum(tokens), "seq_mean": sum(tokens) / len(tokens), "seq_max": max(tokens)}[level]
    return [whole] * len(tokens)


@pytest.mark.parametrize("option", RS_OPTIONS)
def test_rejection(option: str) -> None:
    old, rollout, mask = batch()
    threshold = "0.85_1.2" if option.endswith("k1") else "0.05"
    kept, metrics = helper.compute_rollout_rejection_mask(old - rollout, mask, option, threshold)
    low, high = (math.log(0.85), math.log(1.2)) if option.endswith("k1") else (-INF, 0.05)
    expected = torch.zeros_like(mask)
    for i in range(6):
        tokens = [t for t in range(5) if mask[i, t]]
        values = statistic(option, [float(old[i, t] - rollout[i, t]) for t in tokens]) if tokens else []
        for t, value in zip(tokens, values, strict=True):
            expected[i, t] = int(low <= value <= high)
    assert torch.equal(kept, expected) and kept.dtype is mask.dtype
    dropped = int(mask.sum() - expected.sum())
    assert 0 < dropped < int(mask.sum())
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(dropped / int(mask.sum()))
    rows = ((mask - expected) > 0).any(dim=1).sum() / (mask > 0).any(dim=1).sum()
    assert metrics[f"rollout_rs_{option}_seq_masked_fraction"] == pytest.approx(float(rows))


def test_several_options_must_all_keep_a_token_and_a_repeated_one_counts_once() -> None:
    old, rollout, mask = batch()
    both, _ = helper.compute_rollout_rejection_mask(old - rollout, mask, "token_k2, seq_max_k3,token_k2", "0.05,0.2")
    first, _ = helper.compute_rollout_rejection_mask(old - rollout, mask, "token_k2", 0.05)
    second, _ = helper.compute_rollout_rejection_mask(old - rollout, mask, "seq_max_k3", 0.2)
    assert torch.equal(both, first * second)


def test_offpolicy_metrics() -> None:
    old, rollout, mask = batch()
    rows = [i for i in range(6) if mask[i].any()]
    of_row = {i: [t for t in range(5) if mask[i, t]] for i in rows}
    mean_old = {i: sum(float(old[i, t]) for t in of_row[i]) / len(of_row[i]) for i in rows}
    u = {i: [float(old[i, t] - rollout[i, t]) for t in of_row[i]] for i in rows}
    flat = [x for values in u.values() for x in values]
    found = helper.compute_rollout_corr_metrics_from_logprobs(old, rollout, mask)
    expected = {
        "training_ppl": sum(math.exp(-m) for m in mean_old.values()) / len(rows),
        "training_log_ppl": -sum(mean_old.values()) / len(rows),
        "kl": -sum(flat) / len(flat),
        "k3_kl": sum(math.exp(x) - 1 - x for x in flat) / len(flat),
        "log_ppl_diff": sum(-sum(v) / len(v) for v in u.values()) / len(rows),
        "ppl_ratio": sum(math.exp(-sum(v) / len(v)) for v in u.values()) / len(rows),
        "chi2_token": sum(math.exp(2 * x) for x in flat) / len(flat) - 1,
        "chi2_seq": sum(math.exp(2 * sum(v)) for v in u.values()) / len(rows) - 1,
    }
    assert {name: found[f"rollout_corr/{name}"] for name in expected} == pytest.approx(expected, rel=1e-5)
    alone = helper.compute_offpolicy_metrics(old, None, mask)
    assert set(alone) == {"training_ppl", "training_log_ppl"}


# --- invariants -------------------------------------------------------------------------------------------------------

EVERYTHING = RolloutCorrectionConfig(
    rollout_is="sequence",
    rollout_is_threshold="0.5_2.0",
    rollout_is_batch_normalize=True,
    rollout_rs="token_k1,seq_mean_k3,seq_max_k2",
    rollout_rs_threshold="0.7_1.4,0.2,0.3",
)


def test_padding_empty_rows_and_nan_change_nothing() -> None:
    old, rollout, mask = batch()
    weights, kept, metrics = compute_rollout_correction(old, rollout, mask, EVERYTHING)

    def padded(tensor: torch.Tensor, fill: float) -> torch.Tensor:
        tensor = tensor.masked_fill(mask == 0, fill) if fill else tensor
        return torch.nn.functional.pad(tensor, (0, 3, 0, 2), value=fill)

    nan = float("nan")
    wide = compute_rollout_correction(padded(old, nan), padded(rollout, nan), padded(mask, 0), EVERYTHING)
    assert torch.equal(wide[0][:6, :5], weights) and not wide[0][6:].any()
    assert torch.equal(wide[1][:6, :5], kept) and not wide[1][6:].any()
    assert numbers(wide[2]) == pytest.approx(numbers(metrics))


def test_metrics_know_how_they_combine() -> None:
    old, rollout, mask = batch()
    _, _, metrics = compute_rollout_correction(old, rollout, mask, EVERYTHING)
    tokens, rows = float(mask.sum()), float(mask.any(dim=1).sum())
    kl, seq_mean = metrics["rollout_corr/kl"], metrics["rollout_corr/rollout_is_seq_mean"]
    assert (kl.aggregation, kl.weights) == (AggregationType.MEAN, [tokens])
    assert (seq_mean.aggregation, seq_mean.weights) == (AggregationType.MEAN, [rows])
    assert metrics["rollout_corr/rollout_is_max"].aggregation is AggregationType.MAX
    assert metrics["rollout_corr/log_ppl_diff_min"].aggregation is AggregationType.MIN


def test_rejected_tokens_keep_their_weight_and_nothing_has_a_gradient() -> None:
    old, rollout, mask = batch()
    old.requires_grad_()
    weights, kept, _ = compute_rollout_correction(old, rollout, mask, RolloutCorrectionConfig.decoupled_seq_is_rs())
    assert not weights.requires_grad
    assert bool((weights[(mask - kept) > 0] > 0).all()) and int((mask - kept).sum()) > 0
    assert compute_rollout_correction(old, rollout, mask, {"rollout_is": "token"})[0] is None


# --- edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_that_are_all_zero_have_no_effective_sample(level: str) -> None:
    mask = torch.ones(2, 3)
    weights, metrics = helper.compute_rollout_correction_weights(
        torch.full((2, 3), 4.0), mask, level, "0.5_2.0", rollout_is_batch_normalize=True
    )
    assert not weights.any()
    assert metrics["rollout_is_eff_sample_size"] == 0 and metrics["rollout_is_batch_norm_factor"] == 1
    assert metrics["rollout_is_oob_ratio"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_impossible_tokens_and_extreme_ratios_stay_finite(dtype: torch.dtype) -> None:
    old = torch.tensor([[-INF, -1.0, -INF, -300.0], [0.0, -1.0, -1.0, -1.0]], dtype=dtype)
    rollout = torch.tensor([[-1.0, -INF, -INF, 0.0], [0.0, -200.0, -1.0, -1.0]], dtype=dtype)
    for mask in (torch.ones(2, 4), torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0]])):
        weights, kept, metrics = compute_rollout_correction(old, rollout, mask, EVERYTHING)
        assert torch.isfinite(weights).all() and weights.dtype is torch.float32
        assert set(kept.unique().tolist()) <= {0, 1}
        assert all(math.isfinite(value) for value in numbers(metrics).values())


@pytest.mark.parametrize("options", ["token_k1,token_k2", "token_k3", "seq_sum_k1,seq_mean_k2", "seq_max_k3"])
def test_nan_at_a_valid_token_is_not_rejected_and_shows(options: str) -> None:
    old, rollout = torch.zeros(2, 3), torch.tensor([[0.0, float("nan"), 0.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    cfg = RolloutCorrectionConfig(rollout_is="token", rollout_rs=options, rollout_rs_threshold=2.0)
    weights, kept, metrics = compute_rollout_correction(old, rollout, mask, cfg)
    assert kept.tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert weights.isnan().nonzero().tolist() == [[0, 1]]
    assert math.isnan(metrics["rollout_corr/kl"].aggregate())


def test_a_batch_without_a_valid_token_has_no_metrics() -> None:
    zero = torch.zeros(2, 3)
    weights, kept, metrics = compute_rollout_correction(zero, zero, zero, EVERYTHING)
    assert not weights.any() and not kept.any() and metrics == {}
    with pytest.raises(ValueError, match="no valid token"):
        helper.compute_rollout_correction_and_rejection_mask(zero, zero, zero)
    nothing = torch.zeros(0, 3)
    kept, metrics = helper.compute_rollout_rejection_mask(nothing, nothing, "token_k1", 2.0)
    assert kept.shape == (0, 3) and metrics == {}


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="one shape"):
        compute_rollout_correction(torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3), {})


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(2, (2.0, None)), (0.5, (0.5, None)), ("2.0", (2.0, None)), ("0.5_5.0", (5.0, 0.5)), ("1_2", (2.0, 1.0))],
)
def test_importance_bounds(threshold: Any, expected: tuple[float, float | None]) -> None:
    assert parse_is_threshold(threshold) == expected


@pytest.mark.parametrize(
    ("threshold", "error", "part"),
    [
        (True, TypeError, "must be a number"),
        (None, TypeError, "must be a number"),
        ([1], TypeError, "must be a number"),
        ("", ValueError, "not a number"),
        ("a_b", ValueError, "not a number"),
        ("1_2_3", ValueError, "no range"),
        ("5.0_0.5", ValueError, "try '0.5_5'"),
        (0, ValueError, "more than 0"),
        (-1.0, ValueError, "more than 0"),
        ("nan", ValueError, "more than 0"),
        ("0.0_2.0", ValueError, "more than 0"),
    ],
)
def test_importance_bounds_that_cannot_be_read(threshold: Any, error: type[Exception], part: str) -> None:
    with pytest.raises(error, match=part):
        parse_is_threshold(threshold)


def test_rejection_bounds() -> None:
    log2 = math.log(2)
    assert parse_rs_thresholds(("token_k1",), 2.0) == (Bounds(-log2, log2),)
    assert parse_rs_thresholds(("seq_sum_k1", "seq_max_k2"), "0.5_2.0,3") == (Bounds(-log2, log2), Bounds(None, 3.0))
    assert parse_rs_thresholds(("token_k2", "token_k3"), "0.1") == (Bounds(None, 0.1), Bounds(None, 0.1))
    assert parse_rs_options(" token_k1 ,seq_max_k2,token_k1") == ("token_k1", "seq_max_k2")


@pytest.mark.parametrize(
    ("options", "threshold", "error", "part"),
    [
        ("token_k1", None, ValueError, "needs rollout_rs_threshold"),
        ("token_k1", False, TypeError, "must be a number"),
        ("token_k2", "0.5_2.0", ValueError, "one upper bound"),
        ("token_k1", 0.5, ValueError, "at least 1"),
        ("token_k1,token_k2,token_k3", "1.5,2.0", ValueError, "2 bounds for the 3"),
        ("token_k1", "", ValueError, "not a number"),
        ("token_k9", 2.0, ValueError, "token_k9"),
        ("", 2.0, ValueError, "no option"),
        (5, 2.0, ValueError, "must be a string"),
    ],
)
def test_rejection_options_that_cannot_be_read(options: Any, threshold: Any, error: type[Exception], part: str) -> None:
    with pytest.raises(error, match=part):
        helper.compute_rollout_rejection_mask(torch.zeros(1, 2), torch.ones(1, 2), options, threshold)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="rollout_is='geometric'"):
        helper.compute_rollout_correction_weights(torch.zeros(1, 2), torch.ones(1, 2), "geometric")
