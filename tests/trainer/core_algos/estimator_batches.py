"""Random batches of estimators: groups of different size, rows of different length, holes in the mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo import core_algos

NAMES = [name.value for name in core_algos.AdvantageEstimator]
CONFIG = {"gamma": 0.93, "norm_adv_by_std_in_grpo": True}


@dataclass
class Batch:
    """[B, T] tensors and the group of each row."""

    rewards: Tensor
    mask: Tensor
    index: list[str]
    values: Tensor
    old_log_probs: Tensor
    sum_pi_squared: Tensor
    rho: Tensor
    baselines: Tensor

    def select(self, order: list[int], names: dict[str, str] | None = None) -> Batch:
        """These rows, in this order; groups renamed by `names`."""
        index = [self.index[i] for i in order]
        rows = {k: v[order] for k, v in vars(self).items() if isinstance(v, Tensor)}
        return Batch(index=index if names is None else [names[n] for n in index], **rows)

    def keywords(self) -> dict[str, Any]:
        """As the trainer calls an estimator."""
        return {
            "token_level_rewards": self.rewards,
            "response_mask": self.mask,
            "index": self.index,
            "values": self.values,
            "old_log_probs": self.old_log_probs,
            "sum_pi_squared": self.sum_pi_squared,
            "rollout_is_weights": self.rho,
            "reward_baselines": self.baselines,
        }


def random_batch(seed: int, rows: int = 13, width: int = 7, smallest_group: int = 1, empty_rows: bool = True) -> Batch:
    """Scores on the last valid token, some tied; per-token rewards on others; interleaved groups."""
    rng = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng)

    groups = max(1, rows // 4)
    index = [f"u{i % groups}" for i in range(rows)]
    if smallest_group == 1:
        index[-1] = "single"
    order = torch.randperm(rows, generator=rng).tolist()
    index = [index[i] for i in order]
    lengths = torch.randint(0 if empty_rows else 1, width + 1, (rows,), generator=rng)
    mask = (torch.arange(width) < lengths.unsqueeze(1)).float()
    holes = rand(rows, width) < 0.2
    holes[:, 0] = False
    mask[holes] = 0
    rewards = 0.1 * (rand(rows, width) - 0.5)
    rewards[rand(rows) < 0.5] = 0
    outcome = torch.randint(0, 3, (rows,), generator=rng).float() / 2
    last = (lengths - 1).clamp(min=0)
    rewards[torch.arange(rows), last] += outcome
    log_probs = -3 * rand(rows, width)
    return Batch(
        rewards=rewards,
        mask=mask,
        index=index,
        values=rand(rows, width),
        old_log_probs=log_probs,
        sum_pi_squared=log_probs.exp().square() + 0.05 * rand(rows, width),
        rho=0.5 + rand(rows, width),
        baselines=rand(rows),
    )


def batch_for(name: str, seed: int) -> Batch:
    """A batch that the estimator accepts."""
    return random_batch(seed, smallest_group=2 if name == "grpo_passk" else 1)


def run(name: str, batch: Batch, **options: Any) -> tuple[Tensor, Tensor]:
    """(advantages, returns) of a registered estimator, called with keywords as the trainer does."""
    options = {"config": CONFIG} | options
    if name == "gae":
        options = {"gamma": 0.93, "lam": 0.8} | options
    return core_algos.get_adv_estimator_fn(name)(**batch.keywords() | options)
