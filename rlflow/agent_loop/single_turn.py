"""The plain loop: one prompt, one answer."""

from __future__ import annotations

from time import monotonic
from typing import Any

from rlflow.agent_loop.base import AgentLoopBase
from rlflow.agent_loop.output import AgentLoopMetrics, AgentLoopOutput
from rlflow.agent_loop.registry import register


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Template, one generate call, done. Every response token is the model's, so the mask is all ones."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
        started = monotonic()
        output = await self.server_manager.generate(
            request_id=f"{kwargs['uid']}_{kwargs['session_id']}",
            prompt_ids=prompt_ids,
            sampling_params=sampling_params,
        )
        seconds = monotonic() - started
        budget = int(self.rollout_config.response_length)
        response_ids = list(output.token_ids[:budget])
        logprobs = None if output.log_probs is None else list(output.log_probs[:budget])
        preempted = -1 if output.num_preempted is None else output.num_preempted
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_mask=[1] * len(response_ids),
            response_logprobs=logprobs,
            num_turns=2,
            metrics=AgentLoopMetrics(generate_sequences=seconds, num_preempted=preempted),
            extra_fields={
                **(output.extra_fields or {}),
                "stop_reason": output.stop_reason,
                "turn_scores": [],
                "tool_rewards": [],
            },
        )
