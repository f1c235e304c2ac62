"""A user's estimator, agent loop and static batches in a real run, without touching the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlflow.trainer.ppo import core_algos

ESTIMATOR = """
from rlflow.trainer.ppo.core_algos import register_adv_est

@register_adv_est("constant_for_test")
def constant(token_level_rewards, response_mask, index, config=None, **kwargs):
    advantages = 0.5 * response_mask
    return advantages, advantages
"""

AGENT_LOOP = """
from rlflow.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

@register("short_for_test")
class ShortLoop(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
        output = await self.server_manager.generate(
            request_id=f"{kwargs['uid']}_{kwargs['session_id']}",
            prompt_ids=prompt_ids,
            sampling_params={**sampling_params, "max_tokens": 3},
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            num_turns=2,
            metrics=AgentLoopMetrics(),
        )
"""


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    yield
    core_algos.ADV_ESTIMATOR_REGISTRY.pop("constant_for_test", None)


@pytest.mark.timeout(200)
def test_a_users_estimator_and_agent_loop_run_from_files(
    run_trainer: Callable[..., Any],
    tiny_overrides: list[str],
    read_metrics: Callable[[], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    (tmp_path / "estimator.py").write_text(ESTIMATOR)
    (tmp_path / "short_loop.py").write_text(AGENT_LOOP)
    run_trainer(
        [
            *tiny_overrides,
            f"actor_rollout_ref.model.external_lib=[{tmp_path}/estimator.py,{tmp_path}/short_loop.py]",
            "algorithm.adv_estimator=constant_for_test",
            "actor_rollout_ref.rollout.agent.default_agent_loop=short_for_test",
            "trainer.total_training_steps=1",
            # Static micro-batches, several optimizer steps and passes, padded rows.
            "actor_rollout_ref.actor.use_dynamic_bsz=false",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3",
            "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "actor_rollout_ref.actor.ppo_epochs=2",
            "actor_rollout_ref.model.use_remove_padding=false",
        ]
    )
    [line] = read_metrics()
    assert line["data"]["critic/advantages/mean"] == 0.5
    assert line["data"]["response_length/max"] <= 3
    assert line["data"]["actor/grad_norm"] > 0
