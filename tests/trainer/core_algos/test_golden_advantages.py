"""Every advantage estimator against measured values (tolerance 1e-4)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.trainer.ppo import core_algos

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "core_algos.json").read_text())
INPUTS = GOLDEN["inputs"]
# What each case sets beside the common inputs; the name of the estimator is the first word of the case.
OPTIONS: dict[str, dict[str, Any]] = {
    "gae gamma=.9 lam=.8": {"gamma": 0.9, "lam": 0.8},
    "grpo": {},
    "grpo {'norm_adv_by_std_in_grpo': False}": {"norm_adv_by_std_in_grpo": False},
    "grpo_vectorized": {},
    "rloo": {},
    "rloo_vectorized": {},
    "opo": {},
    "gpg": {},
    "reinforce_plus_plus_baseline": {},
    "reinforce_plus_plus gamma=.9": {"config": {"gamma": 0.9}},
    "remax baselines=[.1,.2,.3,.4,.5,.6]": {"reward_baselines": torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])},
    "optimal_token_baseline": {},
    "optimal_token_baseline handle_zero_tail=False": {"handle_zero_tail": False},
    "tir_optimal_token_baseline": {},
    "tir_optimal_token_baseline handle_zero_tail=False": {"handle_zero_tail": False},
    "grpo_passk (first 5 rows only)": {"config": {"norm_adv_by_std_in_grpo": True}},
    "gdpo fallback (no components)": {},
}


@pytest.mark.parametrize("case", GOLDEN["advantages"])
def test_estimator_gives_the_measured_advantages_and_returns(case: str) -> None:
    old_log_probs = torch.tensor(INPUTS["old_log_prob"])
    keywords: dict[str, Any] = {
        "token_level_rewards": torch.tensor(INPUTS["token_level_rewards"]),
        "response_mask": torch.tensor(INPUTS["response_mask"]),
        "values": torch.tensor(INPUTS["values"]),
        "old_log_probs": old_log_probs,
        "sum_pi_squared": (2 * old_log_probs).exp() + 0.05,
        "index": INPUTS["index"],
    }
    rows = 5 if "first 5 rows" in case else 6
    keywords = {name: value[:rows] for name, value in keywords.items()} | OPTIONS[case]
    advantages, returns = core_algos.get_adv_estimator_fn(case.split()[0])(**keywords)
    expected = GOLDEN["advantages"][case]
    torch.testing.assert_close(advantages, torch.tensor(expected["advantages"]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(returns, torch.tensor(expected["returns"]), atol=1e-4, rtol=1e-4)


def test_there_is_a_case_for_every_estimator() -> None:
    assert {case.split()[0] for case in GOLDEN["advantages"]} == {name.value for name in core_algos.AdvantageEstimator}
    assert set(core_algos.AdvantageEstimator) <= set(core_algos.ADV_ESTIMATOR_REGISTRY)
