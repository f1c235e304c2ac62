"""Learning-rate schedules by the numbers."""

from __future__ import annotations

import math

import pytest
import torch

from rlflow.utils.torch_functional import get_wsd_schedule_with_warmup
from rlflow.utils.torch_functional.schedules import constant_factor, cosine_factor, wsd_factor


def test_cosine_with_warmup_follows_the_table() -> None:
    expected = [0, 0.5, 1, 0.9657, 0.8682, 0.7222, 0.55, 0.3778, 0.2318, 0.1343, 0.1]
    assert [cosine_factor(s, 2, 10, min_ratio=0.1) for s in range(11)] == pytest.approx(expected, abs=1e-4)
    assert cosine_factor(25, 2, 10, min_ratio=0.1) == pytest.approx(0.1)
    assert cosine_factor(1, 2, 10, zero_indexed=False) == pytest.approx(1.0)
    assert cosine_factor(0, 2, 10, init_ratio=0.4) == pytest.approx(0.4)


def test_constant_with_warmup() -> None:
    assert [constant_factor(s, 4) for s in range(6)] == [0, 0.25, 0.5, 0.75, 1, 1]
    assert constant_factor(0, 0) == 1


def test_wsd_is_a_warmup_a_plateau_and_a_cosine() -> None:
    # 2 steps of warm-up, half of the other 8 stable, 4 steps down to 0.2.
    expected = [0, 0.5, 1, 1, 1, 1, *[0.2 + 0.4 * (1 + math.cos(math.pi * k / 4)) for k in range(5)], 0.2]
    factors = [wsd_factor(s, 2, 10, min_ratio=0.2, stable_ratio=0.5) for s in range(12)]
    assert factors == pytest.approx(expected)
    assert [wsd_factor(s, 0, 4, stable_ratio=1.0) for s in range(4)] == [1, 1, 1, 1]


def test_the_schedule_scales_the_learning_rate() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = get_wsd_schedule_with_warmup(optimizer, 2, 10, min_lr_ratio=0.2, stable_ratio=0.5)
    seen = []
    for _ in range(11):
        seen += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx([2 * wsd_factor(s, 2, 10, min_ratio=0.2, stable_ratio=0.5) for s in range(11)])
