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


def learning_rates(steps: int = 25, **options):
    """Learning rates of the steps 0, 1, ... of an engine's schedule, lr 2."""
    config = FSDPOptimizerConfig(lr=2.0, total_training_steps=20, **options)
    optimizer = build_optimizer(params(), config)
    scheduler = build_lr_scheduler(optimizer, config)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def of_transformers(name: str, steps: int = 25, **options):
    import transformers.optimization as reference

    optimizer = torch.optim.AdamW(params(), lr=2.0)
    scheduler = getattr(reference, name)(optimizer, **options)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("ours", "name", "theirs"),
    [
        ({"lr_warmup_steps": 5}, "get_constant_schedule_with_warmup", {"num_warmup_steps": 5}),
        (
            {"lr_scheduler_type": "cosine", "lr_warmup_steps_ratio": 0.2},
            "get_cosine_schedule_with_warmup",
            {"num_warmup_steps": 4, "num_training_steps": 20},
        ),
        (
            {"lr_scheduler_type": "cosine", "lr_warmup_steps": 3, "num_cycles": 1.5},
            "get_cosine_schedule_with_warmup",
            {"num_warmup_steps": 3, "num_training_steps": 20, "num_cycles": 1.5},
        ),
        (
            {"lr_scheduler_type": "cosine", "lr_warmup_steps": 2, "min_lr_ratio": 0.1},
            "get_cosine_with_min_lr_schedule_with_warmup",
            {"num_warmup_steps": 2, "num_training_steps": 20, "min_lr_rate": 0.1},
        ),
    ],
)
def test_schedules_are_those_of_transformers(ours, name, theirs):
    # Past the last step transformers' cosine rises again; ours stays at the minimum.
    assert learning_rates(21, **ours) == pytest.approx(of_transformers(name, 21, **theirs), abs=1e-12)


def test_the_cosine_stays_at_its_minimum_and_may_count_from_one():
    rates = learning_rates(30, lr_scheduler_type="cosine", min_lr_ratio=0.25)
    assert rates[20:] == pytest.approx([0.5] * 10)
    shifted = learning_rates(20, lr_scheduler_type="cosine", min_lr_ratio=0.25, zero_indexed_step=False)
    assert shifted == pytest.approx(rates[1:21])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"override_optimizer_config": {"eps": 1e-3, "amsgrad": True}}),
        ("Adam", {"betas": [0.8, 0.95], "weight_decay": 0.1}),
        ("SGD", {"override_optimizer_config": {"momentum": 0.9, "nesterov": True}}),
        ("RMSprop", {"weight_decay": 0.0}),
    ],
)
def test_a_step_is_that_of_the_class_with_these_arguments(name, options):
    config = FSDPOptimizerConfig(lr=0.1, optimizer=name, **options)
    reference = {"lr": 0.1, "weight_decay": config.weight_decay, **(config.override_optimizer_config or {})}
    if "Adam" in name:
        reference["betas"] = tuple(config.betas)
    mine, theirs = params(), params()
    ours, torchs = build_optimizer(mine, config), getattr(torch.optim, name)(theirs, **reference)
    for step in range(4):
        for group, optimizer in ((mine, ours), (theirs, torchs)):
            torch.manual_seed(step)
            for param in group:
                param.grad = torch.randn_like(param)
            optimizer.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert not torch.equal(mine[0], torch.ones(3))


def test_only_what_is_trained_gets_an_optimizer():
    frozen, trained = params()
    frozen.requires_grad_(False)
    assert build_optimizer([frozen, trained], FSDPOptimizerConfig()).param_groups[0]["params"] == [trained]
    with pytest.raises(ConfigError, match="forward_only"):
        build_optimizer([frozen], FSDPOptimizerConfig())


def test_old_names_of_options_still_work():
    with pytest.warns(DeprecationWarning, match="clip_grad"):
        assert FSDPOptimizerConfig(grad_clip=0.3).clip_grad == 0.3
    with pytest.warns(DeprecationWarning, match="lr_scheduler_type"):
        assert FSDPOptimizerConfig(warmup_style="cosine").lr_scheduler_type == "cosine"


@pytest.mark.parametrize(
    "options",
    [
        {"lr_warmup_steps_ratio": 1.5},
        {"lr_scheduler_type": "wsd"},
        {"nonfinite_grad": "ignore"},
        {"max_skipped_steps": -1},
    ],
)
def test_options_that_mean_nothing_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        FSDPOptimizerConfig(**options)


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
