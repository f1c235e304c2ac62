"""The edge cases of docs/estimators.md: what each estimator gives, and that it is finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from estimator_batches import NAMES, Batch, batch_for, random_batch, run
from torch import Tensor

from rlflow.trainer.ppo import core_algos


def finite(name: str, batch: Batch, **options: Any) -> Tensor:
    advantages, returns = run(name, batch, **options)
    assert advantages[batch.mask.bool()].isfinite().all() and returns[batch.mask.bool()].isfinite().all()
    return advantages


def constant(batch: Batch, score: float = 0.1) -> Batch:
    """Every row has this score."""
    batch.rewards = torch.zeros_like(batch.rewards)
    batch.rewards[:, 0] = score
    return batch


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", 0.6),
        ("grpo_vectorized", 0.6),
        ("rloo", 0.6),
        ("rloo_vectorized", 0.0),
        ("opo", 0.6),
        ("gpg", 0.6),
        ("reinforce_plus_plus_baseline", 0.0),
        ("gdpo", 0.0),
        ("optimal_token_baseline", 0.6),
        ("tir_optimal_token_baseline", 0.6),
    ],
)
def test_a_group_of_one(name: str, expected: float) -> None:
    batch = random_batch(0, rows=1, empty_rows=False)
    batch.mask = torch.ones_like(batch.mask)
    batch.rewards = torch.zeros_like(batch.rewards)
    batch.rewards[0, -1] = 0.6
    advantages = finite(name, batch, norm_adv_by_std_in_grpo=True)
    torch.testing.assert_close(advantages, torch.full_like(advantages, expected), atol=1e-5, rtol=1e-5)


def test_pass_at_k_refuses_a_group_of_one_and_a_missing_config() -> None:
    with pytest.raises(ValueError, match=r"1 of 4 groups.*rollout\.n >= 2"):
        run("grpo_passk", random_batch(0))
    with pytest.raises(ValueError, match="norm_adv_by_std_in_grpo"):
        run("grpo_passk", random_batch(0, smallest_group=2), config=None)
    with pytest.raises(ValueError, match="gamma"):
        run("reinforce_plus_plus", random_batch(0), config=None)


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg"])
def test_a_constant_group_teaches_exactly_nothing(name: str) -> None:
    # 0.1 has no exact binary form: a mean rounded in fp32 would leave 1e-8, which 1 / (std + 1e-6) makes 1e-2.
    assert not finite(name, constant(random_batch(1, smallest_group=2))).any()


def test_large_scores_keep_their_small_differences() -> None:
    batch = constant(random_batch(1, rows=4, smallest_group=2, empty_rows=False), 0.0)
    batch.rewards[:, 0] = 100_000 + torch.tensor([0.0, 0.25, 0.5, 0.75])
    batch.index = ["u"] * 4
    shifted = finite("grpo", batch)
    batch.rewards[:, 0] -= 100_000
    torch.testing.assert_close(shifted, finite("grpo", batch))


@pytest.mark.parametrize("name", NAMES)
def test_a_row_without_tokens_gets_nothing(name: str) -> None:
    batch = batch_for(name, 3)
    batch.mask[4] = 0
    advantages = finite(name, batch)
    assert name == "gae" or not advantages[4].any()


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_tokens_is_finite(name: str) -> None:
    batch = batch_for(name, 3)
    batch.mask = torch.zeros_like(batch.mask)
    advantages, returns = run(name, batch)
    assert advantages.isfinite().all() and returns.isfinite().all()
    assert name == "gae" or not advantages.any()


@pytest.mark.parametrize("name", NAMES)
def test_one_valid_token_in_the_whole_batch(name: str) -> None:
    batch = batch_for(name, 3)
    batch.mask = torch.zeros_like(batch.mask)
    batch.mask[2, 3] = 1
    advantages = finite(name, batch)
    if name in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"):
        assert advantages[2, 3].abs() < 1e-3, "whitening a single value leaves 0"


@pytest.mark.parametrize("name", NAMES)
def test_infinite_log_probs_and_garbage_outside_the_mask(name: str) -> None:
    batch = batch_for(name, 5)
    clean = run(name, batch)[0]
    outside = batch.mask == 0
    for field in (batch.values, batch.old_log_probs, batch.sum_pi_squared, batch.rho):
        field[outside] = float("nan")
    advantages = finite(name, batch)
    torch.testing.assert_close(advantages[~outside], clean[~outside])
    batch.old_log_probs[~outside] = float("-inf")
    finite(name, batch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_computed_in_single(name: str, dtype: torch.dtype) -> None:
    batch = batch_for(name, 6)
    fields = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in vars(batch).items()}
    half = Batch(**fields)
    rounded = Batch(**{k: v.float() if isinstance(v, Tensor) else v for k, v in fields.items()})
    advantages, returns = run(name, half)
    expected, expected_returns = run(name, rounded)
    assert advantages.dtype == returns.dtype == torch.float32
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected_returns)


@pytest.mark.parametrize("name", NAMES)
def test_integer_and_bool_masks_are_masks(name: str) -> None:
    batch = batch_for(name, 7)
    expected = run(name, batch)[0]
    for dtype in (torch.int64, torch.bool):
        batch.mask = batch.mask.to(dtype)
        torch.testing.assert_close(run(name, batch)[0], expected)


def test_reinforce_plus_plus_does_not_carry_rewards_over_tool_output() -> None:
    rewards, mask = torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    _, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config={"gamma": 1.0})
    assert returns.tolist() == [[0.0, 0.0, 1.0, 1.0]]
    _, returns = core_algos.compute_remax_outcome_advantage(rewards, torch.zeros(1), mask)
    assert returns.tolist() == [[1.0, 1.0, 1.0, 1.0]]
