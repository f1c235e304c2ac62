"""From rows to groups: padding, masked samples and several outputs of one session."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlflow.trainer.ppo import advantage
from rlflow.trainer.ppo.core_algos import FixedKLController
from rlflow.utils.errors import ContractError

CONFIG = SimpleNamespace(adv_estimator="grpo", norm_adv_by_std_in_grpo=True)


def advantages(keys: list[str], scores: list[float], mask: torch.Tensor) -> torch.Tensor:
    rewards = torch.zeros_like(mask)
    rewards[:, -1] = torch.tensor(scores)
    return advantage.compute_advantage(keys, rewards, {"response_mask": mask}, CONFIG)[0]


def test_groups_of_two_prompts() -> None:
    keys = [f"u{prompt}_{session}_0" for prompt in "AB" for session in range(3)]
    result = advantages(keys, [1, 0, 0, 0, 1, 1], torch.ones(6, 2))
    assert result[:, 0].tolist() == pytest.approx([1.1547, -0.5774, -0.5774, -1.1547, 0.5774, 0.5774], abs=1e-4)
    assert torch.equal(result[:, 0], result[:, 1])


def test_a_masked_sample_moves_no_statistic() -> None:
    mask = torch.ones(4, 2)
    mask[3] = 0
    result = advantages(["u_0_0", "u_1_0", "u_2_0", "u_3_0"], [1, 0, 0, 0], mask)
    assert result[:3, 0].tolist() == pytest.approx([1.1547, -0.5774, -0.5774], abs=1e-4)
    assert result[3].tolist() == [0, 0]


def test_only_the_last_output_of_a_session_enters_the_group() -> None:
    keys = ["u_0_0", "u_0_1", "u_1_0", "u_2_0"]
    mask = torch.tensor([[1.0, 1], [0, 1], [1, 1], [1, 0]])
    result = advantages(keys, [1, 1, 0, 0], mask)
    assert result[0].tolist() == pytest.approx([1.1547, 1.1547], abs=1e-4)
    assert result[1].tolist() == pytest.approx([0, 1.1547], abs=1e-4)
    assert result[2].tolist() == pytest.approx([-0.5774, -0.5774], abs=1e-4)


def test_gae_gets_values_gamma_and_lambda_and_sees_every_output_of_a_session() -> None:
    config = SimpleNamespace(adv_estimator="gae", gamma=0.5, lam=0.0)
    mask = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    rewards = torch.tensor([[0.0, 1.0], [0.0, 2.0], [9.0, 9.0]])
    dense = {"response_mask": mask, "values": torch.tensor([[1.0, 4.0], [0.0, 2.0], [7.0, 7.0]])}
    keys = ["u_0_0", "u_0_1", "u_1_0"]
    advantages, returns = advantage.compute_advantage(keys, rewards, dense, config)
    # lam=0: one-step targets, r + gamma V(next)
    assert returns[:2].tolist() == [[2.0, 1.0], [1.0, 2.0]]
    raw = torch.tensor([1.0, -3.0, 1.0, 0.0])
    expected = (raw - raw.mean()) / raw.std()
    assert advantages[:2].flatten().tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    with pytest.raises(ContractError, match="no critic wrote them"):
        advantage.compute_advantage(keys, rewards, {"response_mask": mask}, config)


def test_kl_in_reward_uses_the_coefficient_before_it_adapts() -> None:
    dense = {
        "old_log_probs": torch.tensor([[-1.0, -1.0]]),
        "ref_log_prob": torch.tensor([[-1.5, -9.0]]),
        "rm_scores": torch.tensor([[0.0, 1.0]]),
        "response_mask": torch.tensor([[1.0, 0.0]]),
    }
    rewards, metrics = advantage.apply_kl_penalty(dense, FixedKLController(0.1), "kl")
    assert rewards[0].tolist() == pytest.approx([-0.05, 1.0])
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
