"""Loss, KL and aggregation against measured values (tolerance 1e-4), registries, edges of GAE and whitening."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlflow.config import FSDPActorConfig
from rlflow.trainer.ppo import core_algos

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "core_algos.json").read_text())
INPUTS = GOLDEN["inputs"]


def tensor(name: str) -> torch.Tensor:
    return torch.tensor(INPUTS[name])


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(actual), torch.tensor(expected), atol=1e-4, rtol=1e-4)


def test_gae_steps_over_tokens_that_the_policy_did_not_write() -> None:
    rewards, values = torch.rand(1, 6), torch.rand(1, 6)
    mask = torch.tensor([[1.0, 1, 0, 0, 1, 0]])
    rewards[0, 2], values[0, 3] = 7.0, float("nan")
    dense = mask[0].bool()
    options = {"gamma": 0.9, "lam": 0.7}
    with_tools, with_returns = core_algos.compute_gae_advantage_return(rewards, values, mask, **options)
    without, returns = core_algos.compute_gae_advantage_return(
        rewards[:, dense], values[:, dense], torch.ones(1, 3), **options
    )
    close(with_tools[:, dense], without.tolist())
    close(with_returns[:, dense], returns.tolist())


def test_whitening_and_its_edges() -> None:
    close(core_algos.aggregate.masked_whiten(tensor("log_prob"), tensor("response_mask")), GOLDEN["prims"]["whiten"])
    one = torch.tensor([[3.0, float("nan")]])
    assert core_algos.aggregate.masked_whiten(one, torch.tensor([[1.0, 0.0]]))[0, 0] == 0
    assert torch.isfinite(core_algos.aggregate.masked_whiten(torch.ones(2, 2), torch.zeros(2, 2))).all()


def test_value_loss_against_the_measured_one_and_by_hand() -> None:
    values, mask = tensor("values"), tensor("response_mask")
    vpreds = (values + 0.7).requires_grad_()
    loss, clipfrac = core_algos.compute_value_loss(vpreds, torch.ones_like(values), values, mask, cliprange_value=0.5)
    assert loss.item() == pytest.approx(GOLDEN["value_loss"]["loss"], abs=1e-6)
    assert clipfrac.item() == pytest.approx(GOLDEN["value_loss"]["clipfrac"], abs=1e-6)
    loss.backward()
    assert not vpreds.grad[mask == 0].any()
    # Where clipping makes the error larger, the prediction has moved far enough and gets no gradient.
    moved = (values + 0.5 - 1).square() > (values + 0.7 - 1).square()
    assert not vpreds.grad[moved].any() and vpreds.grad[~moved & (mask == 1)].all()

    row = {"vpreds": [[1.0, 2.0]], "values": [[0.0, 2.0]], "returns": [[2.0, 0.0]]}
    by_hand = {name: torch.tensor(value) for name, value in row.items()}
    loss, clipfrac = core_algos.compute_value_loss(**by_hand, response_mask=torch.ones(1, 2), cliprange_value=0.5)
    assert (loss.item(), clipfrac.item()) == (1.5625, 0.5)


@pytest.mark.parametrize("weight", [None, 0.5])
def test_vanilla_loss_gradient_and_metrics(weight: float | None) -> None:
    expected = GOLDEN["policy_loss"]["vanilla" if weight is None else "vanilla is_weights=0.5"]
    config = FSDPActorConfig(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28)
    log_prob = tensor("log_prob").requires_grad_()
    advantages = torch.tensor(GOLDEN["advantages"]["grpo"]["advantages"])
    weights = None if weight is None else torch.full_like(log_prob, weight).detach()
    loss, metrics = core_algos.get_policy_loss_fn("vanilla")(
        old_log_prob=tensor("old_log_prob"),
        log_prob=log_prob,
        advantages=advantages,
        response_mask=tensor("response_mask").bool(),
        config=config,
        rollout_is_weights=weights,
    )
    close(loss.detach(), expected["loss"])
    for name, value in expected["metrics"].items():
        assert metrics[name] == pytest.approx(value, abs=1e-4)
    if "grad_log_prob" in expected:
        loss.backward()
        close(log_prob.grad, expected["grad_log_prob"])


@pytest.mark.parametrize("mode", [m for m in GOLDEN["agg_loss"] if m != "inputs"])
def test_aggregation(mode: str) -> None:
    mask = tensor("response_mask")
    mask[2] = 0
    loss_mat = (5 * torch.arange(6).unsqueeze(1) + torch.arange(5)) / 10
    counts = {"dp_size": 2, "batch_num_tokens": 40, "global_batch_size": 12, "loss_scale_factor": 100}
    close(core_algos.agg_loss(loss_mat, mask, mode), GOLDEN["agg_loss"][mode]["default"])
    close(core_algos.agg_loss(loss_mat, mask, mode, **counts), GOLDEN["agg_loss"][mode]["global_"])


@pytest.mark.parametrize(
    "mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_a_batch_without_tokens_has_loss_zero_even_when_it_holds_nan(mode: str) -> None:
    loss_mat = torch.full((2, 3), float("nan"), requires_grad=True)
    loss = core_algos.agg_loss(loss_mat, torch.zeros(2, 3), mode)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(loss_mat.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("name", list(GOLDEN["kl"]))
def test_kl_value_and_gradient(name: str) -> None:
    log_prob = tensor("log_prob")[:2].clone().requires_grad_()
    value = core_algos.kl_penalty(log_prob, tensor("old_log_prob")[:2], name)
    close(value.detach(), GOLDEN["kl"][name]["value"])
    value.sum().backward()
    close(log_prob.grad, GOLDEN["kl"][name]["grad"])


def test_adaptive_kl_controller() -> None:
    node = SimpleNamespace(type="adaptive", kl_coef=0.001, target_kl=0.1, horizon=10000)
    controller = core_algos.get_kl_controller(node)
    controller.update(0.5, 1024)
    assert controller.value == pytest.approx(GOLDEN["adaptive_kl"]["value"], abs=1e-7)


def test_nothing_takes_the_adaptive_coefficient_away() -> None:
    controller = core_algos.AdaptiveKLController(init_kl_coef=0.1, target_kl=0.1, horizon=10)
    for kl in (float("nan"), float("inf"), -float("inf")):
        controller.update(kl, 4)
    controller.load_state_dict({"value": float("nan")})
    assert controller.value == 0.1
    controller.update(0.0, 1000)  # 1 - 0.2 x 1000 / 10 is below 0
    assert controller.value == pytest.approx(0.05)
    controller.update(1.0, 5)
    assert controller.value == pytest.approx(0.05 * 1.1)


def test_a_name_can_be_registered_once_and_unknown_names_get_a_hint() -> None:
    @core_algos.register_adv_est("test_only")
    def mine(**kwargs: Any) -> Any: ...

    assert core_algos.register_adv_est("test_only")(mine) is mine
    with pytest.raises(ValueError, match="already"):
        core_algos.register_adv_est("test_only")(lambda **kwargs: None)
    del core_algos.ADV_ESTIMATOR_REGISTRY["test_only"]
    with pytest.raises(ValueError, match="Did you mean 'grpo'"):
        core_algos.get_adv_estimator_fn("grppo")
    with pytest.raises(ValueError, match="Did you mean 'grpo'"):
        core_algos.get_adv_estimator_fn("GRPO")


def test_what_is_no_name_is_not_registered() -> None:
    no_name: Any
    for no_name in (None, 3, ["grpo"]):
        with pytest.raises(ValueError, match="is not registered"):
            core_algos.get_adv_estimator_fn(no_name)
        with pytest.raises(ValueError, match="is not registered"):
            core_algos.get_policy_loss_fn(no_name)


def test_groups_need_not_be_adjacent_and_large_rewards_keep_their_spread() -> None:
    scores = torch.tensor([1000.0, 5.0, 1000.5, 7.0])
    stats = core_algos.group_stats(scores, ["a", "b", "a", "b"])
    close(stats.mean, [1000.25, 6.0, 1000.25, 6.0])
    close(stats.std, [0.353553, 1.414214, 0.353553, 1.414214])
