"""The numbers of one training step, from what the trainer has in hand.

Padding rows and rows without a valid reward are left out of data metrics, and counted in timing and throughput. Names
are those users have on their dashboards (docs/metrics.md); units: lengths in tokens, times in seconds, log-probs and
entropy in nats.

Invariants
    - A statistic of nothing is NaN, never 0: scores when every response is empty, values of a batch without tokens.
    - Token fields are dense [B, T] or jagged [B, j]; what stands outside `response_mask` moves no number.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.utils.nested import is_nested, nested_row_sums, nested_values

# Stages whose work is per token of the whole batch; `gen` is per token of the responses.
PER_TOKEN_STAGES = ("ref", "values", "adv", "update_critic", "update_actor")


@contextmanager
def marked_timer(name: str, timing: dict[str, float]) -> Iterator[None]:
    """Add the seconds of the block to `timing[name]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing[name] = timing.get(name, 0.0) + time.perf_counter() - start


def spread(prefix: str, values: Tensor) -> dict[str, float]:
    """`{prefix}/mean|max|min`; NaN when there are no values."""
    if values.numel() == 0:
        return {f"{prefix}/{stat}": float("nan") for stat in ("mean", "max", "min")}
    values = values.float()
    return {
        f"{prefix}/mean": values.mean().item(),
        f"{prefix}/max": values.max().item(),
        f"{prefix}/min": values.min().item(),
    }


def valid_tokens(field: Tensor, mask: Tensor) -> Tensor:
    """Values [M] of `field` at the tokens of the mask; both dense [B, T] or both jagged."""
    if is_nested(field):
        return nested_values(field)[nested_values(mask).bool()]
    return field[mask.bool()]


def row_sums(field: Tensor) -> Tensor:
    """Sum of each row, float [B], of a dense or jagged field (empty rows: 0)."""
    return nested_row_sums(field) if is_nested(field) else field.float().sum(-1)


@dataclass(frozen=True)
class Rows:
    """What is known of the rows beside their tensors.

    Fields:
        prompt, response: lengths in tokens, float [B].
        limits: the longest (prompt, response) there can be, in tokens.
        invalid: bool [B], rows whose reward is no measurement (a scorer that failed); None: there are none.
    """

    prompt: Tensor
    response: Tensor
    limits: tuple[int, int]
    invalid: Tensor | None = None


def data_metrics(fields: Mapping[str, Tensor], rewards: Tensor, rows: Rows) -> dict[str, float]:
    """Scores, advantages and lengths of a batch.

    `*_length/clip_ratio` is the share of rows that reached `rows.limits` (the reference compares with the longest row
    of the batch, which some row always reaches).

    Args:
        fields: `rm_scores`, `response_mask`, `advantages`, `returns`, with a critic `values`; padding rows removed.
        rewards: token-level rewards (scores minus a KL penalty when there is one).
        rows: lengths, limits and validity.
    """
    mask = fields["response_mask"]
    written = rows.response > 0
    counted = written if rows.invalid is None else written & ~rows.invalid
    metrics = {
        **spread("critic/score", row_sums(fields["rm_scores"])[counted]),
        **spread("critic/rewards", row_sums(rewards)[counted]),
        **spread("critic/advantages", valid_tokens(fields["advantages"], mask)),
        **spread("critic/returns", valid_tokens(fields["returns"], mask)),
        **_lengths("response_length", rows.response, rows.limits[1]),
        **_lengths("response_length_non_aborted", rows.response[written], rows.limits[1]),
        **_lengths("prompt_length", rows.prompt, rows.limits[0]),
        "response/aborted_ratio": _share(~written),
    }
    if "values" in fields:
        metrics |= _value_metrics(valid_tokens(fields["values"], mask), valid_tokens(fields["returns"], mask))
    return metrics


def step_data_metrics(
    fields: Mapping[str, Tensor], rewards: Tensor, tags: list[dict[str, Any]], limits: tuple[int, int]
) -> dict[str, float]:
    """`data_metrics` of rows known by their tags (`prompt_len`, `response_len`, `invalid` for masked samples), and how
    many of them have no valid reward.

    Args:
        fields, rewards: see `data_metrics`.
        tags: one a row.
        limits: the longest (prompt, response) the configuration allows, in tokens.
    """
    invalid = torch.tensor([bool(tag.get("invalid")) for tag in tags], dtype=torch.bool)
    rows = Rows(
        prompt=torch.tensor([float(tag["prompt_len"]) for tag in tags]),
        response=torch.tensor([float(tag["response_len"]) for tag in tags]),
        limits=limits,
        invalid=invalid,
    )
    return {**data_metrics(fields, rewards, rows), "training/reward/invalid": int(invalid.sum())}


def _value_metrics(values: Tensor, returns: Tensor) -> dict[str, float]:
    """Spread of the values, and the share of the returns' variance that they explain (1: all, 0: none); NaN for fewer
    than two tokens.
    """
    explained = float("nan")
    if values.numel() > 1:
        explained = 1.0 - (returns - values).var().item() / (returns.var().item() + 1e-5)
    return {**spread("critic/values", values), "critic/vf_explained_var": explained}


def _lengths(prefix: str, lengths: Tensor, limit: int) -> dict[str, float]:
    return {**spread(prefix, lengths), f"{prefix}/clip_ratio": _share(lengths >= limit)}


def _share(chosen: Tensor) -> float:
    return chosen.float().mean().item() if chosen.numel() else float("nan")


def compute_log_prob_metrics(old: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    """How far trainer and rollout engine disagree about the sampled tokens; all three dense or all three jagged.

    The five reference keys are in probability space; `training/rollout_log_probs_diff/*` (nats) is what the alarm
    looks at. Without a token only the reference keys are there: `valid` is 0 and the others are NaN.
    """
    a, b = valid_tokens(old, mask).double(), valid_tokens(rollout, mask).double()
    prefix = "training/rollout_probs_diff"
    nan = float("nan")
    if not a.numel():
        return {
            f"{prefix}_valid": 0,
            **{f"{prefix}_{stat}": nan for stat in ("max", "mean", "std")},
            "training/rollout_actor_probs_pearson_corr": nan,
        }
    difference = (a.exp() - b.exp()).abs()
    log_difference = (a - b).abs()
    several = a.numel() > 1
    correlation = torch.corrcoef(torch.stack([a.exp(), b.exp()]))[0, 1].item() if several else nan
    return {
        f"{prefix}_valid": 1,
        f"{prefix}_max": difference.max().item(),
        f"{prefix}_mean": difference.mean().item(),
        f"{prefix}_std": difference.std().item() if several else 0.0,
        "training/rollout_actor_probs_pearson_corr": correlation,
        "training/rollout_log_probs_diff/max": log_difference.max().item(),
        "training/rollout_log_probs_diff/mean": log_difference.mean().item(),
    }


def compute_version_metrics(tags: list[dict[str, Any]], step: int) -> dict[str, float]:
    """Weight versions of the trajectories: span, and staleness against the version step `step` trains on."""
    low = torch.tensor([float(tag["min_global_steps"]) for tag in tags])
    high = torch.tensor([float(tag["max_global_steps"]) for tag in tags])
    prefix = "training/off_policy"
    return {
        **spread(f"{prefix}/trajectory_spans", high - low + 1),
        **spread(f"{prefix}/trajectory_staleness", (step - 1) - high),
        **spread(f"{prefix}/trajectory_staleness_worst", (step - 1) - low),
    }


def step_timing_metrics(timing: Mapping[str, float], response_tokens: int, all_tokens: int) -> dict[str, float]:
    """`timing_s/*`, and milliseconds a token for the stages whose work is per token."""
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing.items()}
    tokens = {"gen": response_tokens, **dict.fromkeys(PER_TOKEN_STAGES, all_tokens)}
    for name, count in tokens.items():
        if name in timing and count:
            metrics[f"timing_per_token_ms/{name}"] = timing[name] * 1000 / count
    return metrics


def compute_throughput_metrics(timing: Mapping[str, float], all_tokens: int, n_devices: int) -> dict[str, float]:
    """Tokens of the step, its seconds, and tokens a second a device."""
    return {
        "perf/total_num_tokens": all_tokens,
        "perf/time_per_step": timing["step"],
        "perf/throughput": all_tokens / (timing["step"] * n_devices),
    }
