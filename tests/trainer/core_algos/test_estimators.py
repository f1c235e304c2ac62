"""Estimators against independent float64 oracles, and what must hold for any batch."""

from __future__ import annotations

from typing import Any

import estimator_oracles as oracles
import numpy as np
import pytest
import torch
from estimator_batches import CONFIG, NAMES, batch_for, random_batch, run
from torch import Tensor

from rlflow.trainer.ppo import core_algos

SEEDS = range(6)
OUTCOME = ["grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline", "gdpo"]


def assert_valid_equal(actual: Tensor, expected: Any, mask: Tensor) -> None:
    expected = torch.tensor(expected, dtype=torch.float32)
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("name", [*OUTCOME, "grpo_passk"])
@pytest.mark.parametrize("seed", SEEDS)
def test_outcome_estimators_equal_their_definition(name: str, seed: int, by_std: bool) -> None:
    batch = batch_for(name, seed)
    config = {"norm_adv_by_std_in_grpo": by_std}
    advantages, returns = run(name, batch, norm_adv_by_std_in_grpo=by_std, config=config, non_tensor_batch=None)
    oracle = oracles.grpo if name == "grpo_vectorized" else getattr(oracles, name)
    expected = oracle(batch.rewards.tolist(), batch.mask.tolist(), batch.index, by_std=by_std)
    assert_valid_equal(advantages, expected, batch.mask)
    assert returns is advantages
    assert not advantages[batch.mask == 0].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_equals_its_definition(seed: int) -> None:
    batch = random_batch(seed)
    advantages, returns = run("gae", batch)
    lists = batch.rewards.tolist(), batch.mask.tolist(), batch.values.tolist()
    for actual, expected in zip((advantages, returns), oracles.gae(*lists, 0.93, 0.8), strict=True):
        assert_valid_equal(actual, expected, batch.mask)


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_plus_plus_equals_its_definition(seed: int) -> None:
    batch = random_batch(seed)
    advantages, returns = run("reinforce_plus_plus", batch)
    expected = oracles.reinforce_plus_plus(batch.rewards.tolist(), batch.mask.tolist(), 0.93)
    assert_valid_equal(advantages, expected[0], batch.mask)
    assert_valid_equal(returns, expected[1], torch.ones_like(batch.mask))


@pytest.mark.parametrize("seed", SEEDS)
def test_remax_equals_its_definition(seed: int) -> None:
    batch = random_batch(seed)
    advantages, returns = run("remax", batch)
    expected = oracles.remax(batch.rewards.tolist(), batch.mask.tolist(), batch.baselines.tolist())
    everywhere = torch.ones_like(batch.mask)
    assert_valid_equal(advantages, expected[0], everywhere)
    assert_valid_equal(returns, expected[1], everywhere)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
@pytest.mark.parametrize("seed", SEEDS)
def test_optimal_token_baselines_equal_their_definition(name: str, seed: int, tail: bool, weighted: bool) -> None:
    batch = random_batch(seed)
    rho = batch.rho if weighted else None
    advantages, returns = run(name, batch, handle_zero_tail=tail, rollout_is_weights=rho)
    expected = oracles.optimal_token_baseline(
        batch.rewards.tolist(),
        batch.mask.tolist(),
        batch.index,
        batch.old_log_probs.tolist(),
        batch.sum_pi_squared.tolist(),
        rho=None if rho is None else rho.tolist(),
        handle_zero_tail=tail,
        compact=name.startswith("tir"),
    )
    assert_valid_equal(advantages, expected[0], torch.ones_like(batch.mask))
    assert_valid_equal(returns, expected[1], torch.ones_like(batch.mask))


def test_the_optimal_token_baseline_minimises_the_weighted_square_of_its_residual() -> None:
    batch = random_batch(1, rows=8, smallest_group=2, empty_rows=False)
    batch.mask = torch.ones_like(batch.mask)
    advantages, returns = run("optimal_token_baseline", batch, rollout_is_weights=None)
    weights = (1 - 2 * batch.old_log_probs.exp() + batch.sum_pi_squared).cumsum(-1)
    group = torch.tensor([n == batch.index[0] for n in batch.index])
    baseline = (returns - advantages)[group]

    def power(shift: float) -> Tensor:
        return (weights[group] * (returns[group] - baseline - shift).square()).sum(0)

    assert (power(0.0) < power(0.01)).all() and (power(0.0) < power(-0.01)).all()


def test_gdpo_normalises_each_component_and_weighs_the_sum() -> None:
    batch = random_batch(3)
    rng = np.random.default_rng(3)
    components = {"accuracy": rng.integers(0, 2, 13).astype(object), "format": 100 * rng.random(13)}
    config = {"gdpo_reward_keys": ["accuracy", "format"], "gdpo_reward_weights": [1.0, 0.25]}
    advantages, _ = run("gdpo", batch, config=config, non_tensor_batch=components)
    lists = [[float(v) for v in components[name]] for name in ("accuracy", "format")]
    expected = oracles.gdpo_of_components(lists, [1.0, 0.25], batch.mask.tolist(), batch.index)
    assert_valid_equal(advantages, expected, batch.mask)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "gdpo_reward_keys names none"),
        ({"gdpo_reward_keys": ["accuracy", "style"]}, "no reward has style"),
        ({"gdpo_reward_keys": ["accuracy"], "gdpo_reward_weights": [1.0, 2.0]}, "2 numbers for the 1 names"),
        ({"gdpo_reward_keys": ["holes"]}, "1 of 13 rewards have no finite holes"),
    ],
)
def test_gdpo_says_what_is_wrong_with_its_components(config: dict[str, Any], message: str) -> None:
    components = {"accuracy": np.ones(13), "holes": np.array([np.nan] + [0.0] * 12)}
    with pytest.raises(ValueError, match=message):
        run("gdpo", random_batch(0), config=config, non_tensor_batch=components)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_rows_and_the_names_of_groups_do_not_matter(name: str) -> None:
    batch = batch_for(name, 11)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(5)).tolist()
    # Renaming also reverses the order in which groups are numbered.
    names = {n: f"g{9 - k}" for k, n in enumerate(sorted(set(batch.index)))}
    for actual, expected in zip(run(name, batch.select(order, names)), run(name, batch), strict=True):
        torch.testing.assert_close(actual, expected[order], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_per_row_form_is_the_same_estimator(name: str) -> None:
    function = core_algos.get_adv_estimator_fn(name)
    rows = core_algos.get_outcome_fn(function)
    outcome = name in [*OUTCOME, "grpo_passk"]
    assert (rows is not None) == outcome
    if rows is not None:
        batch = batch_for(name, 2)
        group = core_algos.group_stats(torch.zeros(13), batch.index).group
        values = rows(batch.rewards.sum(-1), group, batch.mask.sum(-1), config=CONFIG, norm_adv_by_std_in_grpo=True)
        torch.testing.assert_close(values.unsqueeze(1) * batch.mask, run(name, batch)[0])


@pytest.mark.parametrize("name", NAMES)
def test_no_gradient_flows_and_unknown_keywords_pass(name: str) -> None:
    batch = batch_for(name, 4)
    batch.rewards.requires_grad_()
    advantages, returns = run(name, batch, something_new=1, ref_log_prob=None)
    assert not advantages.requires_grad and not returns.requires_grad


def test_rewards_are_scores_minus_the_log_ratio() -> None:
    scores, old, ref = torch.tensor([[0.0, 1.0]]), torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    assert core_algos.compute_rewards(scores, old, ref, 0.1).tolist() == [[pytest.approx(-0.05), pytest.approx(1.1)]]
