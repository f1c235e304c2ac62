"""Bypass mode in a whole run whose sessions have two outputs: no log-prob pass, and the loss rejects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rlflow.transfer_queue as tq
from rlflow.observe.journal import read_lines
from rlflow.trainer.ppo.trainer_sync import PPOTrainerSync
from rlflow.utils import tensordict_utils as tu

AGENT_LOOP = """
from rlflow.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

@register("two_outputs_for_test")
class TwoOutputs(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        prompt, outputs = await self.apply_chat_template(kwargs["raw_prompt"]), []
        for turn in range(2):
            answer = await self.server_manager.generate(
                request_id=f"{kwargs['uid']}_{kwargs['session_id']}", prompt_ids=prompt,
                sampling_params={**sampling_params, "max_tokens": 3 + turn},
            )
            outputs.append(AgentLoopOutput(
                prompt_ids=prompt, response_ids=answer.token_ids, response_mask=[1] * len(answer.token_ids),
                response_logprobs=answer.log_probs, metrics=AgentLoopMetrics(),
            ))
            prompt = prompt + answer.token_ids
        return outputs
"""


class Watcher(PPOTrainerSync):
    """Keeps the batch as the update reads it."""

    seen: list[Any]

    def _update_actor(self, batch: Any, metrics: Any) -> None:
        names = ["old_log_probs", "rollout_log_probs", "advantages", "response_mask", "rm_scores"]
        self.seen.append((list(batch.keys), tq.kv_batch_get(batch.keys, "train", names)))
        super()._update_actor(batch, metrics)


@pytest.mark.timeout(200)
def test_the_loss_of_the_bypass_mode_rejects_what_is_out_of_bounds(
    run_trainer: Callable[..., Any],
    tiny_overrides: list[str],
    read_metrics: Callable[[], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    (tmp_path / "loop.py").write_text(AGENT_LOOP)
    Watcher.seen = []
    run_trainer(
        [
            *tiny_overrides,
            "trainer.total_training_steps=1",
            f"actor_rollout_ref.model.external_lib={tmp_path}/loop.py",
            "actor_rollout_ref.rollout.agent.default_agent_loop=two_outputs_for_test",
            "algorithm.rollout_correction.bypass_mode=true",
            "algorithm.rollout_correction.loss_type=reinforce",
            "algorithm.rollout_correction.rollout_is=token",
            # The ratio of every token is near 1.
            "algorithm.rollout_correction.rollout_rs=token_k1",
            "algorithm.rollout_correction.rollout_rs_threshold=1.5_2.0",
        ],
        Watcher,
    )
    [(keys, data)] = Watcher.seen
    assert torch.equal(data["old_log_probs"].values(), data["rollout_log_probs"].values()), "copied, not computed"
    numbers = read_metrics()[0]["data"]
    assert numbers["rollout_corr/rollout_rs_masked_fraction"] == 1.0
    assert data["advantages"].values().abs().max() > 0 and numbers["actor/grad_norm"] == 0, "it reaches the gradient"
    assert numbers["rollout_corr/k3_kl"] < 1e-6 and numbers["rollout_corr/rollout_is_mean"] == pytest.approx(
        1.0, abs=1e-3
    )
    assert "actor/entropy" not in numbers
    started = next(iter(read_lines(tmp_path / "checkpoints" / "events.jsonl")))
    [stage] = [stage for stage in started["stages"] if stage["stage"] == "old_log_prob"]
    assert (stage["group"], stage["reads"], stage["writes"]) == ("controller", ["rollout_log_probs"], ["old_log_probs"])

    assert len(keys) == 12, "two prompts, three sessions, two outputs"
    rows = dict(zip(keys, zip(data["advantages"].unbind(), data["rm_scores"].unbind(), strict=True), strict=True))
    for key, (advantage, scores) in rows.items():
        last, last_scores = rows[f"{key[:-1]}1"]
        assert advantage.tolist() == [pytest.approx(float(last[0]))] * len(advantage), "one value a session"
        assert float(scores.sum()) == float(last_scores.sum())
    assert tu.nested_lengths(data["advantages"]).tolist() != [4] * 12
