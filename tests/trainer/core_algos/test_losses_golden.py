"""Policy losses and rollout correction against values measured on the reference (tolerance 1e-4)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.config import FSDPActorConfig, PolicyLossConfig, RolloutCorrectionConfig
from rlflow.trainer.ppo import core_algos, rollout_corr_helper
from rlflow.utils.metric import Metric

FOLDER = Path(__file__).parents[2] / "golden"
INPUTS = json.loads((FOLDER / "core_algos.json").read_text())["inputs"]
GOLDEN = json.loads((FOLDER / "losses.json").read_text())
MASK = torch.tensor(INPUTS["response_mask"])
LOSSES = [case for case in GOLDEN["policy_loss"] if case != "config" and not case.startswith("bypass_mode")]


def tensor(name: str) -> torch.Tensor:
    return torch.tensor(INPUTS[name])


def config(**policy_loss: Any) -> FSDPActorConfig:
    """The configuration the values were measured with."""
    options = {"clip_cov_ratio": 0.3, "clip_cov_lb": -10.0, "clip_cov_ub": 10.0, "kl_cov_ratio": 0.3, "dro_beta": 0.5}
    return FSDPActorConfig(
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        policy_loss=PolicyLossConfig(**(options | policy_loss)),
    )


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(actual), torch.tensor(expected), atol=1e-4, rtol=1e-4)


def run(name: str, *, old: str = "old_log_prob", weight: float | None = None, **policy_loss: Any) -> Any:
    log_prob = tensor("log_prob").requires_grad_()
    loss, metrics = core_algos.get_policy_loss_fn(name)(
        old_log_prob=tensor(old),
        log_prob=log_prob,
        advantages=torch.tensor(GOLDEN["loss_advantage_input"]["value"]),
        response_mask=MASK.bool(),
        loss_agg_mode="token-mean",
        config=config(loss_mode=name, **policy_loss),
        rollout_is_weights=None if weight is None else torch.full_like(MASK, weight),
    )
    loss.backward()
    numbers = {key: value.aggregate() if isinstance(value, Metric) else value for key, value in metrics.items()}
    return loss.detach(), numbers, log_prob.grad


@pytest.mark.parametrize("case", LOSSES)
def test_policy_loss(case: str) -> None:
    expected = GOLDEN["policy_loss"][case]
    name, _, weight = case.partition(" is_weights=")
    loss, metrics, gradient = run(name, weight=float(weight) if weight else None)
    assert metrics == pytest.approx(expected["metrics"], abs=1e-4)
    if name != "clip_cov":  # the reference picks tokens at random; see the test of its own
        close(loss, expected["loss"])
    if "grad_log_prob" in expected:
        close(gradient, expected["grad_log_prob"])


def test_every_loss_of_the_reference_has_a_measured_case() -> None:
    measured = {case.split(" ")[0] for case in GOLDEN["policy_loss"] if case != "config"}
    assert measured == set(core_algos.POLICY_LOSS_REGISTRY) - {"ppo"} and len(measured) == 12
    assert core_algos.get_policy_loss_fn("ppo") is core_algos.get_policy_loss_fn("vanilla")


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_bypass_mode(loss_type: str) -> None:
    expected = GOLDEN["policy_loss"][f"bypass_mode {loss_type}"]
    correction = RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_threshold=2.0,
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold="0.8_1.3",
        bypass_mode=True,
        loss_type=loss_type,
    )
    loss, metrics, gradient = run("bypass_mode", old="rollout_log_prob", rollout_correction=correction)
    close(loss, expected["loss"])
    assert metrics == pytest.approx(expected["metrics"], abs=1e-4, rel=1e-4)
    close(gradient, expected["grad_log_prob"])


CORRECTIONS: dict[str, dict[str, Any]] = {
    "metrics only": {},
    "token TIS 2": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    "seq TIS 2 batchnorm": {
        "rollout_is": "sequence",
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": True,
    },
    "token icepop 0.5_1.3": {"rollout_is": "token", "rollout_is_threshold": "0.5_1.3"},
    "rs token_k1 0.6_1.6,seq_max_k2 0.2": {
        "rollout_rs": "token_k1,seq_max_k2",
        "rollout_rs_threshold": "0.6_1.6,0.2",
    },
    "rs seq_sum_k3 .5": {"rollout_rs": "seq_sum_k3", "rollout_rs_threshold": 0.5},
}


@pytest.mark.parametrize("case", GOLDEN["rollout_correction"])
def test_rollout_correction(case: str) -> None:
    expected = GOLDEN["rollout_correction"][case]
    batch, mask, metrics = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        tensor("old_log_prob"), tensor("rollout_log_prob"), MASK, **CORRECTIONS[case]
    )
    if expected["weights"] is None:
        assert batch is None
    else:
        close(batch["rollout_is_weights"], expected["weights"])
    close(mask, expected["mask"])
    assert metrics == pytest.approx(expected["metrics"], abs=1e-4, rel=1e-4)


def test_the_deprecated_form_is_vanilla() -> None:
    expected = GOLDEN["policy_loss"]["vanilla"]
    arguments = (
        tensor("old_log_prob"),
        tensor("log_prob"),
        torch.tensor(GOLDEN["loss_advantage_input"]["value"]),
        MASK,
    )
    with pytest.warns(FutureWarning, match="get_policy_loss_fn"):
        values = core_algos.compute_policy_loss(*arguments, cliprange=0.2, cliprange_high=0.28)
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    assert [float(value) for value in values] == pytest.approx(
        [expected["loss"], *(expected["metrics"][name] for name in names)], abs=1e-4
    )
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="cliprange"):
        core_algos.compute_policy_loss(*arguments, cliprange_low=0.2)


def test_entropy_loss() -> None:
    logits = torch.tensor([[[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [float("nan")] * 3]])
    mask = torch.tensor([[1, 1, 0]])
    expected = GOLDEN["prims"]["entropy"]
    assert core_algos.compute_entropy_loss(logits, mask).item() == pytest.approx(sum(expected) / 2, abs=1e-5)
    assert core_algos.compute_entropy_loss(logits, mask, "token-sum").item() == pytest.approx(sum(expected), abs=1e-5)
