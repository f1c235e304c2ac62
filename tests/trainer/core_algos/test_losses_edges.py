"""Every policy loss stays finite where numbers are extreme, and says what it needs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlflow.config import FSDPActorConfig, PolicyLossConfig, RolloutCorrectionConfig
from rlflow.trainer.ppo import core_algos
from rlflow.utils.metric import Metric

NAMES = sorted(set(core_algos.POLICY_LOSS_REGISTRY) - {"ppo"})
INF = float("inf")


def config(name: str, **options: Any) -> FSDPActorConfig:
    correction = RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_threshold="0.5_5.0",
        rollout_rs="token_k3,seq_mean_k1",
        rollout_rs_threshold="9.0,0.01_100.0",
        bypass_mode=True,
        loss_type="reinforce",
    )
    extra = {"rollout_correction": correction} if name == "bypass_mode" else {}
    return FSDPActorConfig(policy_loss=PolicyLossConfig(**({"loss_mode": name, "dro_beta": 0.1} | extra | options)))


def run(name: str, old: Any, new: Any, mask: Any, advantages: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    new = torch.as_tensor(new, dtype=dtype).clone().requires_grad_()
    advantages = torch.ones(new.shape) if advantages is None else torch.as_tensor(advantages, dtype=torch.float32)
    loss, metrics = core_algos.get_policy_loss_fn(name)(
        old_log_prob=torch.as_tensor(old, dtype=dtype),
        log_prob=new,
        advantages=advantages,
        response_mask=torch.as_tensor(mask),
        loss_agg_mode="token-mean",
        config=config(name),
        rollout_is_weights=torch.ones(new.shape),
    )
    loss.backward()
    numbers = [n for value in metrics.values() for n in (value.values if isinstance(value, Metric) else [value])]
    return loss.detach(), new.grad, numbers


def assert_finite(found: Any) -> None:
    loss, gradient, numbers = found
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()
    assert all(math.isfinite(number) for number in numbers)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_a_valid_token_has_loss_and_gradient_zero(name: str) -> None:
    nan = torch.full((2, 3), float("nan"))
    for old, new in ((nan, nan), (torch.zeros(2, 3), torch.ones(2, 3)), (torch.zeros(2, 0), torch.zeros(2, 0))):
        loss, gradient, numbers = run(name, old, new, torch.zeros(new.shape, dtype=torch.bool), torch.ones(new.shape))
        assert loss == 0 and not gradient.any() and all(math.isfinite(number) for number in numbers)


@pytest.mark.parametrize("name", NAMES)
def test_one_valid_token_is_enough(name: str) -> None:
    mask = [[False, True, False], [False, False, False]]
    loss, gradient, numbers = run(name, [[-1.0] * 3] * 2, [[-1.1] * 3] * 2, mask)
    assert_finite((loss, gradient, numbers))
    # The only token of clip_cov and kl_cov is also the one they pick.
    assert gradient[0, 1] != 0 or name == "clip_cov"
    assert gradient.count_nonzero() <= 1


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", NAMES)
def test_huge_ratios_and_impossible_tokens_stay_finite(name: str, sign: float) -> None:
    old = [[-1e-4, -300.0, -INF, -1.0, -INF, 0.0]]
    new = [[-300.0, -1e-4, -1.0, -INF, -INF, 0.0]]
    for mask in ([[True] * 6], [[False, True, False, False, False, False]], [[False] * 4 + [True, False]]):
        assert_finite(run(name, old, new, mask, [[sign] * 6]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_computed_in_fp32(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    old = (-3 * torch.rand(4, 6, generator=generator)).to(dtype)
    new = (old.float() + 0.1 * torch.randn(4, 6, generator=generator)).to(dtype)
    mask, advantages = torch.rand(4, 6, generator=generator) < 0.8, torch.randn(4, 6, generator=generator)
    loss, gradient, numbers = run(name, old, new, mask, advantages, dtype)
    exact, exact_gradient, exact_numbers = run(name, old.float(), new.float(), mask, advantages)
    assert loss.dtype is torch.float32 and gradient.dtype is dtype
    assert loss == exact and numbers == exact_numbers
    torch.testing.assert_close(gradient.float(), exact_gradient, rtol=1e-2, atol=1e-4)


def test_nan_at_a_valid_token_is_not_hidden() -> None:
    for name in NAMES:
        loss, _, _ = run(name, [[-1.0, -1.0]], [[float("nan"), -1.0]], [[True, True]])
        assert loss.isnan(), name


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("dro", {"dro_beta": None}, "dro_beta=null must be > 0"),
        ("dro", {"dro_beta": 0.0}, "dro_beta=0.0 must be > 0"),
        ("clip_cov", {"clip_cov_ratio": 0.0}, "clip_cov_ratio=0.0 must be > 0"),
        ("kl_cov", {"kl_cov_ratio": -1.0}, "kl_cov_ratio=-1.0 must be > 0"),
        ("sapo", {"tau_neg": -0.5}, "tau_neg=-0.5 must be > 0"),
        ("bypass_mode", {"rollout_correction": None}, "needs policy_loss.rollout_correction"),
        ("bypass_mode", {"rollout_correction": RolloutCorrectionConfig(loss_type="pg")}, "loss_type='pg' is unknown"),
    ],
)
def test_options_that_cannot_work_are_named(name: str, options: dict[str, Any], part: str) -> None:
    tensors = [torch.zeros(1, 2)] * 3
    with pytest.raises(ValueError, match=part):
        core_algos.get_policy_loss_fn(name)(*tensors, torch.ones(1, 2), "token-mean", config(name, **options))
    with pytest.raises(ValueError, match="clip_ratio"):
        core_algos.get_policy_loss_fn("vanilla")(*tensors, torch.ones(1, 2))


def test_clip_ranges_follow_clip_ratio_until_they_are_set() -> None:
    old, new = torch.zeros(1, 2), torch.tensor([[0.5, -0.5]])
    tensors = {"old_log_prob": old, "log_prob": new, "advantages": torch.tensor([[1.0, -1.0]])}
    wide, _ = core_algos.compute_policy_loss_vanilla(
        **tensors, response_mask=torch.ones(1, 2), config=FSDPActorConfig(clip_ratio=0.5)
    )
    set_, _ = core_algos.compute_policy_loss_vanilla(
        **tensors, response_mask=torch.ones(1, 2), config=FSDPActorConfig(clip_ratio=0.5, clip_ratio_low=0.1)
    )
    assert wide.item() == pytest.approx((-1.5 + math.exp(-0.5)) / 2)
    assert set_.item() == pytest.approx((-1.5 + 0.9) / 2)


def test_the_temperatures_of_sapo_are_read_from_either_place() -> None:
    tensors = (torch.zeros(1, 1), torch.full((1, 1), 0.3), torch.ones(1, 1), torch.ones(1, 1))

    def loss(actor: FSDPActorConfig) -> float:
        return core_algos.compute_policy_loss_sapo(*tensors, config=actor)[0].item()

    at_actor = loss(FSDPActorConfig(tau_pos=2.0))
    assert at_actor == loss(FSDPActorConfig(policy_loss=PolicyLossConfig(tau_pos=2.0))) != loss(FSDPActorConfig())
    assert at_actor == loss(FSDPActorConfig(tau_pos=3.0, policy_loss=PolicyLossConfig(tau_pos=2.0)))


def test_kl_and_value_loss_ignore_what_is_masked_and_stay_finite() -> None:
    for kind in ("k1", "abs", "k2", "k3", "k1+", "k3+"):
        new = torch.tensor([-INF, -1.0, -INF, -0.0], requires_grad=True)
        kl = core_algos.kl_penalty(new, torch.tensor([-1.0, -INF, -INF, -0.0]), kind)
        kl.sum().backward()
        assert torch.isfinite(kl).all() and torch.isfinite(new.grad).all(), kind
    vpreds = torch.tensor([[1.0, float("nan")]], requires_grad=True)
    nan = torch.tensor([[2.0, float("nan")]])
    loss, clipfrac = core_algos.compute_value_loss(vpreds, nan, nan, torch.tensor([[1, 0]]), cliprange_value=0.5)
    loss.backward()
    assert loss == 0.5 and clipfrac == 0 and vpreds.grad.tolist() == [[-1.0, 0.0]]


def test_forbidden_logits_have_no_entropy_and_a_finite_gradient() -> None:
    logits = torch.tensor([[[0.0, 0.0, -INF]]], requires_grad=True)
    loss = core_algos.compute_entropy_loss(logits, torch.ones(1, 1))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2)) and torch.isfinite(logits.grad).all()
