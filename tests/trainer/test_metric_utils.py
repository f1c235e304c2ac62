"""The public metric functions, on every form a batch has."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlflow.trainer.ppo import metric_utils
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError
from rlflow.utils.nested import padded_to_nested

PROMPTS, RESPONSES, WIDTH = [2, 3, 1], [4, 0, 2], (3, 5)
MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 0, 0, 0]])  # row 0 has a tool token
SPREADS = ("critic/score", "critic/rewards", "critic/advantages", "critic/returns", "critic/values")
LENGTHS = ("response_length", "response_length_non_aborted", "prompt_length")


def columns() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    attention = torch.zeros(3, sum(WIDTH), dtype=torch.int64)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        attention[row, WIDTH[0] - prompt : WIDTH[0] + response] = 1
    names = ("token_level_scores", "token_level_rewards", "advantages", "returns", "values")
    floats = {name: torch.rand(3, WIDTH[1], generator=generator) for name in names}
    for name in names[:2]:
        floats[name] = floats[name] * attention[:, WIDTH[0] :]
    return {
        **floats,
        "response_mask": MASK,
        "attention_mask": attention,
        "responses": torch.zeros(3, WIDTH[1], dtype=torch.int64),
    }


def as_data_proto(batch: dict[str, torch.Tensor], **more: Any) -> SimpleNamespace:
    td = TensorDict(batch, batch_size=[3])
    return SimpleNamespace(batch=td, non_tensor_batch=more, meta_info={"global_token_num": [6, 3, 3]})


def as_jagged(batch: dict[str, torch.Tensor]) -> TensorDict:
    lengths = torch.tensor(RESPONSES)
    fields = {
        name: padded_to_nested(value, lengths)
        for name, value in batch.items()
        if name not in ("attention_mask", "responses")
    }
    fields["prompts"] = padded_to_nested(torch.zeros(3, WIDTH[0], dtype=torch.int64), torch.tensor(PROMPTS))
    fields["responses"] = padded_to_nested(torch.zeros(3, WIDTH[1], dtype=torch.int64), lengths)
    return tu.get_tensordict(fields)


def test_all_keys_and_their_values_by_plain_numpy() -> None:
    batch = columns()
    metrics = metric_utils.compute_data_metrics(batch)
    expected: dict[str, float] = {}
    for name, column in zip(SPREADS, ("token_level_scores", "token_level_rewards"), strict=False):
        sums = [float(batch[column][row].sum()) for row in (0, 2)]  # row 1 is aborted
        expected |= {f"{name}/mean": np.mean(sums), f"{name}/max": max(sums), f"{name}/min": min(sums)}
    for name, column in zip(SPREADS[2:], ("advantages", "returns", "values"), strict=True):
        tokens = batch[column].numpy()[MASK.numpy() == 1]
        expected |= {f"{name}/mean": tokens.mean(), f"{name}/max": tokens.max(), f"{name}/min": tokens.min()}
    returns, values = (batch[name].double().numpy()[MASK.numpy() == 1] for name in ("returns", "values"))
    expected["critic/vf_explained_var"] = 1 - np.var(returns - values, ddof=1) / (np.var(returns, ddof=1) + 1e-5)
    rows = {LENGTHS[0]: RESPONSES, LENGTHS[1]: [4, 2], LENGTHS[2]: PROMPTS}
    for (name, lengths), width in zip(rows.items(), (5, 5, 3), strict=True):
        expected |= {f"{name}/mean": np.mean(lengths), f"{name}/max": max(lengths), f"{name}/min": min(lengths)}
        expected[f"{name}/clip_ratio"] = np.mean([length >= width for length in lengths])
    expected["response/aborted_ratio"] = 1 / 3
    assert metrics.keys() == expected.keys()
    assert metrics == pytest.approx(expected, abs=1e-6)


def test_every_form_of_a_batch_gives_the_same_numbers() -> None:
    batch = columns()
    expected = metric_utils.compute_data_metrics(batch, max_prompt_length=3, max_response_length=4)
    assert expected["response_length/clip_ratio"] == pytest.approx(1 / 3)
    by_columns = {name: value for name, value in batch.items() if name != "attention_mask"}
    by_columns |= {"prompt_length": torch.tensor(PROMPTS), "response_length": torch.tensor(RESPONSES)}
    for form in (TensorDict(batch, batch_size=[3]), as_data_proto(batch), by_columns, as_jagged(batch)):
        found = metric_utils.compute_data_metrics(form, max_prompt_length=3, max_response_length=4)
        assert found == pytest.approx(expected, abs=1e-6), type(form)


def test_without_limits_the_clip_ratio_is_that_of_the_padded_width() -> None:
    batch = columns()
    assert metric_utils.compute_data_metrics(batch)["response_length/clip_ratio"] == 0
    assert metric_utils.compute_data_metrics(as_jagged(batch))["response_length/clip_ratio"] == pytest.approx(1 / 3)


def test_without_a_critic_values_are_not_read() -> None:
    batch = columns()
    del batch["values"]
    metrics = metric_utils.compute_data_metrics(batch, use_critic=False)
    assert "critic/values/mean" not in metrics and "critic/vf_explained_var" not in metrics
    with pytest.raises(ContractError, match="'values'"):
        metric_utils.compute_data_metrics(batch)


def test_scores_stand_in_for_rewards_and_turns_are_counted() -> None:
    batch = columns()
    batch["rm_scores"] = batch.pop("token_level_scores")
    del batch["token_level_rewards"]
    turns = {"__num_turns__": np.array([2, 4, 6]), "tool_call_counts": np.array([1, None, 3], dtype=object)}
    metrics = metric_utils.compute_data_metrics(as_data_proto(batch, **turns))
    assert metrics["critic/rewards/mean"] == metrics["critic/score/mean"]
    assert [metrics[f"num_turns/{stat}"] for stat in ("min", "max", "mean")] == [2, 6, 4]
    assert [metrics[f"tool_call_counts/{stat}"] for stat in ("min", "max", "mean")] == [1, 3, 2]


def test_a_batch_that_does_not_say_how_long_its_rows_are_is_refused() -> None:
    batch = columns()
    del batch["attention_mask"]
    with pytest.raises(ContractError, match="prompt_length and response_length"):
        metric_utils.compute_data_metrics(batch)


def test_timing_and_throughput() -> None:
    timing = {"step": 4.0, "gen": 3.0, "adv": 0.6, "old_log_prob": 1.0}
    metrics = metric_utils.compute_timing_metrics(columns(), timing)
    assert metrics["timing_s/old_log_prob"] == 1.0 and "timing_per_token_ms/old_log_prob" not in metrics
    assert metrics["timing_per_token_ms/gen"] == pytest.approx(3000 / 6), "response tokens"
    assert metrics["timing_per_token_ms/adv"] == pytest.approx(600 / 12), "all tokens"
    for batch in (columns(), as_data_proto(columns())):
        perf = metric_utils.compute_throughout_metrics(batch, timing, n_gpus=2)
        assert perf == {"perf/total_num_tokens": 12, "perf/time_per_step": 4.0, "perf/throughput": 1.5}


def proxies(batch: dict[str, torch.Tensor], norm: float | None) -> dict[str, float]:
    """The docstring's formulas by plain loops in float64."""
    rows = []
    for row in range(len(batch["response_mask"])):
        tokens = [t for t in range(WIDTH[1]) if batch["response_mask"][row, t]]
        if not tokens:
            continue
        w = 0.0
        for t in tokens:
            rho = float(batch["rollout_is_weights"][row, t]) if "rollout_is_weights" in batch else 1.0
            pi = math.exp(float(batch["old_log_probs"][row, t]))
            w += rho**2 * (1 - 2 * pi + float(batch["sum_pi_squared"][row, t]))
        rows.append((sum(float(batch["advantages"][row, t]) for t in tokens) / len(tokens), w))
    power = sum(a * a * w for a, w in rows) / len(rows)
    signal = 0.0 if norm is None else norm**2
    return {
        "variance_proxy/proxy1_signal_strength": signal,
        "variance_proxy/proxy2_total_power": power,
        "variance_proxy/proxy3_pure_noise": 0.0 if norm is None else max(0.0, (power - signal) / (len(rows) - 1)),
        "variance_proxy/expected_a_squared": sum(a * a for a, _ in rows) / len(rows),
        "variance_proxy/expected_w": sum(w for _, w in rows) / len(rows),
    }


def proxy_batch(weighted: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    old = -torch.rand(3, WIDTH[1], generator=generator)
    batch = {
        "response_mask": MASK,
        "old_log_probs": old,
        "sum_pi_squared": (2 * old).exp() + 0.05,
        "advantages": torch.randn(3, WIDTH[1], generator=generator),
    }
    if weighted:
        batch["rollout_is_weights"] = 2 * torch.rand(3, WIDTH[1], generator=generator)
    for name in batch.keys() - {"response_mask"}:
        batch[name][MASK == 0] = float("nan")
    return batch


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("norm", [None, 0.1, 50.0])
def test_variance_proxies_are_their_formulas(weighted: bool, norm: float | None) -> None:
    batch = proxy_batch(weighted)
    expected = proxies(batch, norm)
    assert metric_utils.compute_variance_proxy_metrics(batch, norm) == pytest.approx(expected, rel=1e-5)
    assert metric_utils.compute_variance_proxy_metrics(as_jagged(batch), norm) == pytest.approx(expected, rel=1e-5)
    if norm == 50.0:
        assert expected["variance_proxy/proxy3_pure_noise"] == 0.0


def test_the_power_is_the_exact_squared_norm_of_a_score_on_the_logits() -> None:
    """For one token: |grad_z log pi_y|^2 = |e_y - pi|^2 = 1 - 2 pi_y + sum pi^2, by autograd."""
    logits = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    log_probs = logits.log_softmax(-1)
    (gradient,) = torch.autograd.grad(log_probs[3], logits)
    one = torch.ones(1, 1)
    batch = {
        "response_mask": one,
        "advantages": 3 * one,
        "old_log_probs": log_probs[3].detach().reshape(1, 1),
        "sum_pi_squared": log_probs.detach().exp().square().sum().reshape(1, 1),
    }
    metrics = metric_utils.compute_variance_proxy_metrics(batch, gradient_norm=1.0)
    assert metrics["variance_proxy/proxy2_total_power"] == pytest.approx(9 * gradient.square().sum().item(), rel=1e-5)
    assert metrics["variance_proxy/proxy3_pure_noise"] == 0.0, "one trajectory has no variance"


def test_without_its_columns_or_tokens_there_is_no_proxy() -> None:
    for name in ("sum_pi_squared", "old_log_probs", "advantages"):
        batch = proxy_batch(weighted=False)
        del batch[name]
        assert metric_utils.compute_variance_proxy_metrics(batch) == {}
    empty = {**proxy_batch(weighted=False), "response_mask": torch.zeros_like(MASK)}
    assert metric_utils.compute_variance_proxy_metrics(empty) == {}


def test_the_names_of_validation_and_reduction_are_here_too() -> None:
    names = ("bootstrap_metric", "calc_maj_val", "process_validation_metrics", "reduce_metrics")
    assert all(callable(getattr(metric_utils, name)) for name in (*names, *metric_utils.__all__))
