"""The Python of the pages, run on small inputs: it does what the page says beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rlflow.reward_loop.result import RewardInput, normalise_result
from rlflow.trainer.ppo import core_algos

ROOT = Path(__file__).resolve().parents[2]
ROW = {"data_source": "mine/sums", "ground_truth": "42", "extra_info": {"index": 0}}


@pytest.fixture(autouse=True)
def clean_registries() -> Iterator[None]:
    estimators, losses = dict(core_algos.ADV_ESTIMATOR_REGISTRY), dict(core_algos.POLICY_LOSS_REGISTRY)
    yield
    for registry, before in (
        (core_algos.ADV_ESTIMATOR_REGISTRY, estimators),
        (core_algos.POLICY_LOSS_REGISTRY, losses),
    ):
        registry.clear()
        registry.update(before)


def namespaces(pages: ModuleType, page: str, name: str) -> list[dict[str, Any]]:
    """The blocks of a page that define `name`, executed."""
    found = []
    for block in pages.blocks("python", pages=[ROOT / "docs" / page]):
        if f"def {name}(" in block.text or f"class {name}(" in block.text:
            namespace: dict[str, Any] = {"__name__": "snippet"}
            exec(compile(block.text, str(block), "exec"), namespace)
            found.append(namespace)
    return found


def test_every_reward_function_of_the_pages_gives_a_score(pages: ModuleType) -> None:
    functions = [
        n["compute_score"] for page in ("quickstart.md", "rewards.md") for n in namespaces(pages, page, "compute_score")
    ]
    assert len(functions) >= 4
    for function in functions:
        for answer in ("I think #### 42", "no idea"):
            result = function(solution_str=answer, **ROW)
            result = asyncio.run(result) if asyncio.iscoroutine(result) else result
            score = normalise_result(result)
            value = score["score"] if isinstance(score, dict) else score
            assert (value > 0.5) == ("42" in answer)


def test_the_reward_manager_of_the_page_halves(pages: ModuleType) -> None:
    [namespace] = namespaces(pages, "rewards.md", "Halved")

    async def scorer(**keywords: Any) -> float:
        assert keywords["solution_str"] == "42"
        return 1.0

    row = {"data_source": "mine", "reward_model": {"ground_truth": "42"}, "extra_info": {}}
    data = RewardInput([1], [2], [1], response_text="42", non_tensor_batch=row)
    manager = namespace["Halved"](config=None, tokenizer=None, compute_score=scorer)
    assert asyncio.run(manager.run_single(data)) == {"reward_score": 0.5, "reward_extra_info": {"whole": 1.0}}


def test_the_estimator_of_the_page_leaves_one_out(pages: ModuleType) -> None:
    assert namespaces(pages, "estimators.md", "centred")
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [5.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]])
    advantages, _ = core_algos.get_adv_estimator_fn("centred")(
        token_level_rewards=rewards, response_mask=mask, index=["a", "a", "a", "b"], config=None
    )
    torch.testing.assert_close(advantages[:3, 0], torch.tensor([1.0, -0.5, -0.5]))
    assert advantages[3, 1] == 0


def test_the_page_of_losses_checks_its_own_and_the_check_bites(pages: ModuleType) -> None:
    from rlflow.testing import check_policy_loss

    [namespace] = namespaces(pages, "losses.md", "soft_clip")
    namespace["test_soft_clip"]()

    def by_own_tokens(**inputs: Any) -> Any:
        inputs["config"].global_batch_info.clear()
        return namespace["soft_clip"](**inputs)

    with pytest.raises(AssertionError, match="breaks 'micro_batches': with micro-batches of rows"):
        check_policy_loss(by_own_tokens)


def test_the_loss_of_the_page_has_the_gradient_of_the_score_function(pages: ModuleType) -> None:
    from rlflow.config import FSDPActorConfig

    assert namespaces(pages, "estimators.md", "reinforce")
    log_prob = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    advantages, mask = torch.tensor([[2.0, 2.0], [-1.0, -1.0]]), torch.tensor([[1, 1], [1, 0]])
    loss, metrics = core_algos.get_policy_loss_fn("reinforce")(
        old_log_prob=log_prob.detach(), log_prob=log_prob, advantages=advantages, response_mask=mask,
        loss_agg_mode="token-mean", config=FSDPActorConfig(), rollout_is_weights=None,
    )  # fmt: skip
    loss.backward()
    torch.testing.assert_close(log_prob.grad, -advantages * mask / 3)
    assert metrics["actor/ppo_kl"] == 0.0
