"""Metrics of a batch: the public names, for scripts, recipes and custom trainers.

    metrics = compute_data_metrics(batch, use_critic=False)
    metrics |= compute_timing_metrics(batch, timing)
    metrics |= compute_throughout_metrics(batch, timing, n_gpus=8)

A batch is whatever `BatchColumns` reads: a dict or TensorDict of columns, dense or jagged, or an object with `batch`,
`non_tensor_batch` and `meta_info`. Padding rows are the caller's to remove. The trainer knows its rows by their tags
and calls `step_metrics` directly. What each number means, and when it is alarming: docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlflow.trainer.ppo.batch_columns import BatchColumns
from rlflow.trainer.ppo.core_algos.optimal_token_baseline import squared_score_norms
from rlflow.trainer.ppo.step_metrics import (
    Rows,
    compute_log_prob_metrics,
    compute_throughput_metrics,
    compute_version_metrics,
    data_metrics,
    marked_timer,
    spread,
    step_data_metrics,
    step_timing_metrics,
)
from rlflow.trainer.ppo.validation_metrics import bootstrap_metric, calc_maj_val, process_validation_metrics
from rlflow.utils.metric import reduce_metrics

__all__ = [
    "bootstrap_metric",
    "calc_maj_val",
    "compute_data_metrics",
    "compute_log_prob_metrics",
    "compute_throughout_metrics",
    "compute_throughput_metrics",
    "compute_timing_metrics",
    "compute_variance_proxy_metrics",
    "compute_version_metrics",
    "marked_timer",
    "process_validation_metrics",
    "reduce_metrics",
    "spread",
    "step_data_metrics",
    "step_timing_metrics",
]

# (metric, columns that may hold it)
_COUNTS = (("num_turns", ("__num_turns__", "num_turns")), ("tool_call_counts", ("tool_call_counts",)))


def compute_data_metrics(
    batch: Any,
    use_critic: bool = True,
    *,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
) -> dict[str, float]:
    """Scores, rewards, advantages, returns, values and lengths of a batch.

    Reads `token_level_scores` (else `rm_scores`), `token_level_rewards` (else the scores), `advantages`, `returns`,
    `response_mask`, with a critic `values`, the lengths (`BatchColumns.lengths`), and where they are there
    `__num_turns__` and `tool_call_counts`.

    Args:
        batch: see the module.
        use_critic: whether to report the values and what they explain of the returns.
        max_prompt_length, max_response_length: limits that `*_length/clip_ratio` compares with; None: the width of the
            padded batch, which some row always reaches.

    Raises:
        ContractError: a column is missing.
    """
    columns = BatchColumns(batch)
    scores = columns.tensor("token_level_scores", "rm_scores")
    names = ("response_mask", "advantages", "returns", *(("values",) if use_critic else ()))
    fields = {"rm_scores": scores, **{name: columns.tensor(name) for name in names}}
    rewards = columns.tensor("token_level_rewards") if "token_level_rewards" in columns else scores
    prompt, response = columns.lengths()
    width = columns.padded_widths()
    limits = (max_prompt_length or width[0], max_response_length or width[1])
    metrics = data_metrics(fields, rewards, Rows(prompt=prompt, response=response, limits=limits))
    for name, places in _COUNTS:
        for place in places:
            if place in columns:
                metrics |= spread(name, columns.numbers(place))
                break
    return metrics


def compute_timing_metrics(batch: Any, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """`timing_s/{name}` of every timer, and `timing_per_token_ms/{name}`: of `gen` over response tokens, of the stages
    that work on whole rows over all tokens.
    """
    prompt, response = BatchColumns(batch).lengths()
    return step_timing_metrics(timing_raw, int(response.sum()), int(prompt.sum() + response.sum()))


def compute_throughout_metrics(batch: Any, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """`perf/total_num_tokens`, `perf/time_per_step` (timer `step`) and `perf/throughput`, tokens a second and device.

    Tokens are those of `global_token_num` (a count a row), else all prompt and response tokens.
    """
    columns = BatchColumns(batch)
    if "global_token_num" in columns:
        tokens = int(columns.numbers("global_token_num").sum())
    else:
        prompt, response = columns.lengths()
        tokens = int(prompt.sum() + response.sum())
    return compute_throughput_metrics(timing_raw, tokens, n_gpus)


def compute_variance_proxy_metrics(batch: Any, gradient_norm: float | None = None) -> dict[str, float]:
    """Signal and noise of the policy gradient, estimated without a second backward pass.

    The squared norm of a trajectory's score is approximated on the logits (as in the optimal token baseline):

        w_t = 1 - 2 pi_t + sum_v pi_v^2,    W_i = sum_t rho_t^2 w_t over its valid tokens (rho: IS weight, else 1)

    With A_i the mean advantage of its valid tokens, over the N rows that have one:

        proxy1_signal_strength = |g|^2                      gradient of the batch; 0 when `gradient_norm` is None
        proxy2_total_power     = mean_i A_i^2 W_i           E|g_i|^2, signal and noise of one trajectory
        proxy3_pure_noise      = max(0, (proxy2 - proxy1) / (N - 1))    variance of the mean; 0 without a norm or N < 2
        expected_a_squared     = mean_i A_i^2
        expected_w             = mean_i W_i

    Args:
        batch: with `sum_pi_squared`, `old_log_probs`, `advantages`, `response_mask`, and `rollout_is_weights` when the
            loss is weighted by them; all dense [B, T], or jagged.
        gradient_norm: norm of the batch's gradient before clipping.

    Returns:
        `variance_proxy/*`; {} without `sum_pi_squared`, `old_log_probs` or `advantages`, or without a valid token.
    """
    columns = BatchColumns(batch)
    if any(name not in columns for name in ("sum_pi_squared", "old_log_probs", "advantages")):
        return {}
    valid = columns.dense("response_mask").bool()
    rows = valid.any(-1)
    if not rows.any():
        return {}
    valid = valid[rows]
    old_log_probs, squares = (columns.dense(name)[rows] for name in ("old_log_probs", "sum_pi_squared"))
    rho = columns.dense("rollout_is_weights")[rows] if "rollout_is_weights" in columns else None
    # A squared norm, so negative by rounding only.
    w_rows = squared_score_norms(old_log_probs, squares, valid, rho).sum(-1).clamp(min=0.0)
    advantages = torch.where(valid, columns.dense("advantages")[rows], 0.0).sum(-1) / valid.sum(-1)
    power = (advantages.square() * w_rows).mean().item()
    signal = 0.0 if gradient_norm is None else float(gradient_norm) ** 2
    count = len(w_rows)
    noise = 0.0 if gradient_norm is None or count < 2 else max(0.0, (power - signal) / (count - 1))
    return {
        "variance_proxy/proxy1_signal_strength": signal,
        "variance_proxy/proxy2_total_power": power,
        "variance_proxy/proxy3_pure_noise": noise,
        "variance_proxy/expected_a_squared": advantages.square().mean().item(),
        "variance_proxy/expected_w": w_rows.mean().item(),
    }
