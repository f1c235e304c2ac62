"""Optimizers by name, schedules by the numbers, gradient norms."""

from __future__ import annotations

import pytest
import torch

from rlflow.config import FSDPOptimizerConfig
from rlflow.utils.errors import ConfigError
from rlflow.workers.engine.fsdp.optim import build_lr_scheduler, build_optimizer, clip_grad_norm


def params():
    return [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]


@pytest.mark.parametrize(("steps", "ratio", "first"), [(4, 0.0, 0.25), (-1, 0.2, 0.5), (-1, 0.0, 1.0)])
def test_warmup_by_steps_or_by_ratio(steps, ratio, first):
    config = FSDPOptimizerConfig(lr=1.0, lr_warmup_steps=steps, lr_warmup_steps_ratio=ratio, total_training_steps=10)
    optimizer = build_optimizer(params(), config)
    scheduler = build_lr_scheduler(optimizer, config)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(first)]


def test_cosine_needs_a_horizon():
    config = FSDPOptimizerConfig(lr=1.0, lr_scheduler_type="cosine")
    with pytest.raises(ConfigError, match="total_training_steps"):
        build_lr_scheduler(build_optimizer(params(), config), config)


def test_optimizers_are_found_by_name_and_get_what_they_take():
    adam = build_optimizer(params(), FSDPOptimizerConfig(lr=0.1, betas=[0.8, 0.9], weight_decay=0.3))
    assert type(adam) is torch.optim.AdamW
    assert adam.defaults["betas"] == (0.8, 0.9) and adam.defaults["weight_decay"] == 0.3
    sgd = build_optimizer(
        params(), FSDPOptimizerConfig(optimizer="SGD", override_optimizer_config={"momentum": 0.5, "foreach": True})
    )
    assert type(sgd) is torch.optim.SGD and sgd.defaults["momentum"] == 0.5
    assert type(build_optimizer(params(), FSDPOptimizerConfig(optimizer="Adagrad"))) is torch.optim.Adagrad


@pytest.mark.parametrize(
    "options",
    [{"optimizer": "NoSuch"}, {"optimizer_impl": "no.such"}, {"override_optimizer_config": {"no_such": 1}}],
)
def test_what_does_not_exist_is_named(options):
    with pytest.raises(ConfigError, match="(?i)no.?such"):
        build_optimizer(params(), FSDPOptimizerConfig(**options))


def test_gradients_are_scaled_to_the_limit_and_no_further():
    for limit, expected in ((1.0, 1.0), (None, 5.0), (100.0, 5.0)):
        p = params()
        p[0].grad = torch.tensor([3.0, 0.0, 0.0])
        p[1].grad = torch.tensor([[4.0, 0.0], [0.0, 0.0]])
        assert clip_grad_norm(p, limit) == pytest.approx(5.0)
        after = torch.sqrt(sum(x.grad.square().sum() for x in p))
        assert float(after) == pytest.approx(expected, rel=1e-5)


def test_a_gradient_that_is_not_finite_is_reported_and_left():
    p = params()
    p[0].grad = torch.tensor([float("nan"), 1.0, 2.0])
    assert not torch.isfinite(torch.tensor(clip_grad_norm(p, 1.0)))
    assert p[0].grad[2] == 2.0


@pytest.mark.parametrize(("name", "fused"), [("AdamW", True), ("SGD", None)])
def test_only_adam_is_fused(name, fused):
    optimizer = build_optimizer(params(), FSDPOptimizerConfig(lr=1.0, optimizer=name))
    assert optimizer.defaults["fused"] is fused
