"""Learning-rate schedules: a factor of the step, and the torch scheduler that applies it."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def constant_factor(step: int, warmup: int) -> float:
    """Linear from 0 to 1 over `warmup` steps, then 1."""
    return step / max(1, warmup) if step < warmup else 1.0


def cosine_factor(
    step: int,
    warmup: int,
    total: int,
    *,
    min_ratio: float = 0.0,
    num_cycles: float = 0.5,
    init_ratio: float = 0.0,
    zero_indexed: bool = True,
) -> float:
    """Linear from `init_ratio` to 1 over `warmup` steps, then a cosine to `min_ratio`, where it stays.

    With p the share of the steps after the warm-up: cos(2 pi cycles p) (1 - min) / 2 + (1 + min) / 2.
    """
    step = step if zero_indexed else step + 1
    if step < warmup:
        return init_ratio + (1.0 - init_ratio) * step / max(1, warmup)
    progress = (step - warmup) / max(1, total - warmup)
    if progress >= 1.0 and num_cycles == 0.5:
        return min_ratio
    wave = math.cos(2 * math.pi * num_cycles * progress)
    return max(min_ratio, wave * (1 - min_ratio) / 2 + (1 + min_ratio) / 2)


def wsd_factor(
    step: int, warmup: int, total: int, *, min_ratio: float = 0.0, num_cycles: float = 0.5, stable_ratio: float = 0.9
) -> float:
    """Warm-up, stable, decay: linear from 0 to 1, then 1, then `cosine_factor`'s cosine to `min_ratio`.

    The stable part is int(stable_ratio x (total - warmup)) steps.
    """
    stable = warmup + int((total - warmup) * stable_ratio)
    if step < stable:
        return constant_factor(step, warmup)
    return cosine_factor(step - stable, 0, total - stable, min_ratio=min_ratio, num_cycles=num_cycles)


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    """Factor `constant_factor`: step 0 of a warm-up has learning rate 0."""
    return LambdaLR(optimizer, lambda step: constant_factor(step, num_warmup_steps), last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    init_lr_ratio: float | None = None,
    zero_indexed_step: bool = True,
) -> LambdaLR:
    """Factor `cosine_factor`."""

    def factor(step: int) -> float:
        return cosine_factor(
            step,
            num_warmup_steps,
            num_training_steps,
            min_ratio=min_lr_ratio,
            num_cycles=num_cycles,
            init_ratio=init_lr_ratio or 0.0,
            zero_indexed=zero_indexed_step,
        )

    return LambdaLR(optimizer, factor, last_epoch)


def get_wsd_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    stable_ratio: float = 0.9,
) -> LambdaLR:
    """Factor `wsd_factor`."""

    def factor(step: int) -> float:
        return wsd_factor(
            step,
            num_warmup_steps,
            num_training_steps,
            min_ratio=min_lr_ratio,
            num_cycles=num_cycles,
            stable_ratio=stable_ratio,
        )

    return LambdaLR(optimizer, factor, last_epoch)
