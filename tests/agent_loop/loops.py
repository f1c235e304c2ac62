"""Agent loops of a user, loaded by the workers through `external_lib`."""

import asyncio

from rlflow.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from rlflow.agent_loop.worker import CONTROL_COLUMNS


def output(response, **fields):
    return AgentLoopOutput(
        prompt_ids=[1, 2],
        response_ids=response,
        response_mask=[1] * len(response),
        response_logprobs=[-1.0] * len(response),
        metrics=AgentLoopMetrics(),
        **fields,
    )


@register("test_two_outputs")
class TwoOutputs(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        return [output([40, 41]), output([42, 43, 44])]


@register("test_nothing")
class Nothing(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        return None if kwargs["session_id"] % 2 else []


@register("test_own_score")
class OwnScore(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        return output([40], reward_score=float("nan") if kwargs["session_id"] else 0.25)


@register("test_stubborn")
class Stubborn(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        await asyncio.Event().wait()


@register("test_kwargs")
class Kwargs(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        hidden = [name for name in CONTROL_COLUMNS if name in kwargs]
        seen = {"columns": sorted(kwargs), "hidden": hidden, "params": sampling_params, "step": kwargs["global_steps"]}
        return output([40], extra_fields={"seen": seen})
