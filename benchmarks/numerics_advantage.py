"""From rewards to advantages: the vectorised group statistics beside a loop over rows, and a whole advantage stage.

    scores -> advantages    16384 scores in groups of 16, by name, to one GRPO advantage a row; beside a loop
                            over rows and groups, on tensors and on Python floats
    advantage stage         1024 prompts x 16 trajectories, lengths uniform in 500-1500: jagged rewards and masks in,
                            jagged advantages and returns out (`compute_advantages`, once a step in the trainer)

`measure()` returns the figures; `python benchmarks/numerics_advantage.py` prints them as JSON.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo import core_algos
from rlflow.trainer.ppo.advantage import compute_advantages
from rlflow.trainer.ppo.core_algos.group_stats import group_index
from rlflow.utils.nested import nested_from_values, nested_like

PROMPTS, SESSIONS = 1024, 16
SHORTEST, LONGEST = 500, 1500
SPEEDUP_GOAL, STAGE_GOAL_S = 20.0, 1.0
OUTCOME = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus_baseline",
    "gdpo",
)
TOKEN_LEVEL = ("gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline")


def figure(name: str, value: float, goal: float | None, unit: str, better: str = "lower") -> dict[str, Any]:
    """One line of the result; a goal of None is reported only."""
    return {"name": name, "value": value, "goal": goal, "unit": unit, "better": better}


def best_of(function: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def loop_over_rows(scores: Tensor, index: list[str], epsilon: float = 1e-6) -> Tensor:
    """GRPO as one would first write it: scores into lists by name, statistics by group, then row by row."""
    of_group: dict[str, list[Tensor]] = defaultdict(list)
    for row, name in enumerate(index):
        of_group[name].append(scores[row])
    mean: dict[str, Tensor] = {}
    std: dict[str, Tensor] = {}
    for name, members in of_group.items():
        stacked = torch.stack(members)
        mean[name] = stacked.mean() if len(members) > 1 else torch.tensor(0.0)
        std[name] = stacked.std() if len(members) > 1 else torch.tensor(1.0)
    advantages = scores.clone()
    for row, name in enumerate(index):
        advantages[row] = (scores[row] - mean[name]) / (std[name] + epsilon)
    return advantages


def loop_over_floats(scores: Tensor, index: list[str], epsilon: float = 1e-6) -> Tensor:
    """The same loop by someone who knows that single elements of tensors are slow: Python floats throughout."""
    values = scores.tolist()
    of_group: dict[str, list[float]] = defaultdict(list)
    for score, name in zip(values, index, strict=True):
        of_group[name].append(score)
    mean = {name: statistics.fmean(v) if len(v) > 1 else 0.0 for name, v in of_group.items()}
    std = {name: statistics.stdev(v, mean[name]) if len(v) > 1 else 1.0 for name, v in of_group.items()}
    return torch.tensor([(s - mean[n]) / (std[n] + epsilon) for s, n in zip(values, index, strict=True)])


def group_advantages() -> list[dict[str, Any]]:
    """The loop's time over the vectorised one's, names of groups included, and the times; two kinds of loop."""
    rng = torch.Generator().manual_seed(0)
    scores = torch.rand(PROMPTS * SESSIONS, generator=rng)
    index = [f"e0r{row // SESSIONS}a0" for row in torch.randperm(len(scores), generator=rng).tolist()]
    rows = core_algos.get_outcome_fn(core_algos.get_adv_estimator_fn("grpo"))
    assert rows is not None

    def vectorised() -> Tensor:
        return rows(scores, group_index(index), torch.ones_like(scores))

    name = f"scores to group advantages, {len(scores)} rows"
    ours = best_of(vectorised, 20)
    figures = [figure(f"{name}: vectorised", 1e3 * ours, None, "ms")]
    for kind, loop, goal in (("tensors", loop_over_rows, SPEEDUP_GOAL), ("Python floats", loop_over_floats, None)):
        torch.testing.assert_close(vectorised(), loop(scores, index), atol=1e-4, rtol=1e-4)
        seconds = best_of(lambda loop=loop: loop(scores, index), 3)
        figures += [
            figure(f"{name}: loop on {kind} / vectorised", seconds / ours, goal, "x", "higher"),
            figure(f"{name}: loop on {kind}", 1e3 * seconds, None, "ms"),
        ]
    return figures


def stage_batch(prompts: int = PROMPTS) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor], Tensor]:
    """(keys, jagged fields, reward components, reward baselines) of a step of `prompts` x 16 trajectories."""
    rng = torch.Generator().manual_seed(0)
    rows = prompts * SESSIONS
    lengths = torch.randint(SHORTEST, LONGEST + 1, (rows,), generator=rng)
    total = int(lengths.sum())
    mask = nested_from_values(torch.ones(total, dtype=torch.int64), lengths)
    scores = torch.rand(rows, generator=rng)
    rewards = torch.zeros(total)
    rewards[lengths.cumsum(0) - 1] = scores
    log_probs = -3 * torch.rand(total, generator=rng)
    fields = {
        "rm_scores": rewards,
        "values": torch.rand(total, generator=rng),
        "old_log_probs": log_probs,
        "sum_pi_squared": (2 * log_probs).exp() + 0.05,
    }
    data = {"response_mask": mask} | {name: nested_like(values, mask) for name, values in fields.items()}
    keys = [f"e0r{row // SESSIONS}a0_{row % SESSIONS}_0" for row in range(rows)]
    return keys, data, {"accuracy": scores.round(), "format": torch.rand(rows, generator=rng)}, torch.rand(rows)


def advantage_stage(prompts: int = PROMPTS, repeats: int = 3) -> list[dict[str, Any]]:
    """Seconds of the stage for each estimator; the goal holds for all that give a row one value."""
    keys, data, components, baselines = stage_batch(prompts)
    figures = []
    for estimator in (*OUTCOME, *TOKEN_LEVEL):
        config = SimpleNamespace(
            adv_estimator=estimator,
            gamma=1.0,
            lam=0.95,
            norm_adv_by_std_in_grpo=True,
            gdpo_reward_keys=list(components),
            gdpo_reward_weights=None,
        )
        gc.collect()

        def stage(config: SimpleNamespace = config) -> None:
            compute_advantages(keys, data, config, reward_baselines=baselines, components=components)

        name = f"advantage stage, {len(keys)} trajectories of {SHORTEST}-{LONGEST} tokens: {estimator}"
        goal = STAGE_GOAL_S if estimator in OUTCOME else None
        figures.append(figure(name, best_of(stage, repeats), goal, "s"))
    return figures


def measure() -> list[dict[str, Any]]:
    """All figures: {"name", "value", "goal" (None: reported only), "unit", "better" (higher | lower)}."""
    return [*group_advantages(), *advantage_stage()]


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=2)
