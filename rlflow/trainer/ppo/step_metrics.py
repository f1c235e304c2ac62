"""The numbers of one training step.

Padding rows and rows without a valid reward are left out of data metrics, and counted in timing and throughput. Names
are those users have on their dashboards; units: lengths in tokens, times in seconds, log-probs and entropy in nats.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


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


def compute_data_metrics(
    dense: dict[str, Tensor], rewards: Tensor, tags: list[dict[str, Any]], limits: tuple[int, int]
) -> dict[str, float]:
    """Scores, advantages and lengths of a batch.

    `*_length/clip_ratio` is the share of rows that reached the configured limit (the reference compares with the
    longest row of the batch, which is always reached by some row).

    Args:
        dense: [B, T] fields `rm_scores`, `response_mask`, `advantages`, `returns`, with a critic `values` (padding
            rows already removed).
        rewards: token-level rewards [B, T] (scores minus a KL penalty when there is one).
        tags: the rows' tags with `prompt_len`, `response_len`, and `invalid` for masked samples.
        limits: the longest (prompt, response) the configuration allows, in tokens.
    """
    prompt = torch.tensor([float(tag["prompt_len"]) for tag in tags])
    response = torch.tensor([float(tag["response_len"]) for tag in tags])
    invalid = torch.tensor([bool(tag.get("invalid")) for tag in tags])
    counted = (response > 0) & ~invalid
    mask = dense["response_mask"].bool()
    metrics = {
        **spread("critic/score", dense["rm_scores"].sum(-1)[counted]),
        **spread("critic/rewards", rewards.sum(-1)[counted]),
        **spread("critic/advantages", dense["advantages"][mask]),
        **spread("critic/returns", dense["returns"][mask]),
        **_lengths("response_length", response, limits[1]),
        **_lengths("response_length_non_aborted", response[response > 0], limits[1]),
        **_lengths("prompt_length", prompt, limits[0]),
        "response/aborted_ratio": (response == 0).float().mean().item(),
        "training/reward/invalid": int(invalid.sum()),
    }
    if "values" in dense:
        metrics |= _value_metrics(dense["values"][mask], dense["returns"][mask])
    return metrics


def _value_metrics(values: Tensor, returns: Tensor) -> dict[str, float]:
    """Spread of the values, and the share of the returns' variance that they explain (1: all, 0: none); NaN for fewer
    than two tokens.
    """
    explained = float("nan")
    if values.numel() > 1:
        explained = 1.0 - (returns - values).var().item() / (returns.var().item() + 1e-5)
    return {**spread("critic/values", values), "critic/vf_explained_var": explained}


def _lengths(prefix: str, lengths: Tensor, limit: int) -> dict[str, float]:
    clip = (lengths >= limit).float().mean().item() if lengths.numel() else float("nan")
    return {**spread(prefix, lengths), f"{prefix}/clip_ratio": clip}


def compute_log_prob_metrics(old: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    """How far trainer and rollout engine disagree about the sampled tokens; all [B, T].

    The five reference keys are in probability space; `training/rollout_log_probs_diff/*` (nats) is what the alarm
    looks at.
    """
    mask = mask.bool()
    if not mask.any():
        nan = float("nan")
        return {
            "training/rollout_probs_diff_valid": 0,
            "training/rollout_probs_diff_max": nan,
            "training/rollout_probs_diff_mean": nan,
            "training/rollout_probs_diff_std": nan,
            "training/rollout_actor_probs_pearson_corr": nan,
        }
    a, b = old[mask].double(), rollout[mask].double()
    difference = (a.exp() - b.exp()).abs()
    log_difference = (a - b).abs()
    pair = torch.stack([a.exp(), b.exp()])
    correlation = torch.corrcoef(pair)[0, 1].item() if pair.shape[1] > 1 else float("nan")
    return {
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_max": difference.max().item(),
        "training/rollout_probs_diff_mean": difference.mean().item(),
        "training/rollout_probs_diff_std": difference.std().item() if difference.numel() > 1 else 0.0,
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


def compute_timing_metrics(timing: dict[str, float], response_tokens: int, all_tokens: int) -> dict[str, float]:
    """`timing_s/*`, and milliseconds a token for the stages whose work is per token."""
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing.items()}
    tokens = {
        "gen": response_tokens,
        **dict.fromkeys(("ref", "values", "adv", "update_critic", "update_actor"), all_tokens),
    }
    for name, count in tokens.items():
        if name in timing and count:
            metrics[f"timing_per_token_ms/{name}"] = timing[name] * 1000 / count
    return metrics


def compute_throughput_metrics(timing: dict[str, float], all_tokens: int, n_devices: int) -> dict[str, float]:
    """Tokens of the step, its seconds, and tokens a second a device."""
    return {
        "perf/total_num_tokens": all_tokens,
        "perf/time_per_step": timing["step"],
        "perf/throughput": all_tokens / (timing["step"] * n_devices),
    }
