from __future__ import annotations

import asyncio
import logging

import pytest

from rlflow.agent_loop.base import AgentLoopBase, DictConfigWrap, ToolListWrap
from rlflow.agent_loop.single_turn import SingleTurnAgentLoop
from rlflow.agent_loop.template_cache import TemplateCache
from rlflow.utils.errors import ContractError, DataError

MESSAGES = [{"role": "user", "content": "hi"}]
RENDERED = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def make_loop(make_config, tokenizer):
    def make(client=None, cls=SingleTurnAgentLoop, cache=None, **rollout):
        config = make_config(**rollout)
        loop = cls(
            trainer_config=DictConfigWrap(config),
            server_manager=client,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=DictConfigWrap(config.data),
            tools=ToolListWrap([]),
        )
        loop.template_cache = cache or loop.template_cache
        return loop

    return make


def run(make, *args, **kwargs):
    async def main():
        return await make(*args, **kwargs).run({"temperature": 1.0}, raw_prompt=MESSAGES, uid="e0r1a0", session_id=3)

    return asyncio.run(main())


def test_one_prompt_one_answer(make_loop, recording_client, output_of, tokenizer):
    client = recording_client(output_of([7, 8, 9], stop_reason="length", global_steps=4))
    output = run(make_loop, client)
    (request,) = client.requests
    assert tokenizer.decode(request.prompt_ids) == RENDERED
    assert request.request_id == "e0r1a0_3"
    assert output.prompt_ids == request.prompt_ids
    assert (output.response_ids, output.response_mask) == ([7, 8, 9], [1, 1, 1])
    assert output.response_logprobs == [-0.5] * 3
    assert output.num_turns == 2 and output.metrics.num_preempted == 0
    assert output.extra_fields == {"global_steps": 4, "stop_reason": "length", "turn_scores": [], "tool_rewards": []}


def test_a_response_is_cut_to_its_budget(make_loop, recording_client, output_of):
    output = run(make_loop, recording_client(output_of(range(10))), response_length=4)
    assert output.response_ids == [0, 1, 2, 3]
    assert len(output.response_mask) == len(output.response_logprobs) == 4


def test_a_long_prompt_keeps_its_end_and_warns_once_per_prompt(
    make_loop, recording_client, output_of, tokenizer, caplog
):
    cache = TemplateCache("e0r1a0")
    client = recording_client(output_of([1]), output_of([1]))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            output = run(make_loop, client, cache=cache, prompt_length=10)
    assert output.prompt_ids == tokenizer.encode(RENDERED, add_special_tokens=False)[-10:]
    assert [record.message for record in caplog.records if "e0r1a0" in record.message] == [
        f"prompt e0r1a0 has {cache.tokens_cut + 10} tokens, over rollout.prompt_length=10; "
        f"its first {cache.tokens_cut} are cut off"
    ]


def test_sessions_of_a_prompt_tokenise_it_once(make_loop):
    cache = TemplateCache("u")
    renders = []

    async def main():
        def render():
            renders.append(1)
            return [1, 2, 3]

        first, second = await asyncio.gather(*(cache.get(["key"], render, None) for _ in range(2)))
        first.append(4)
        return second, await cache.get(["key"], render, None), await cache.get(["other"], render, None)

    assert asyncio.run(main()) == ([1, 2, 3], [1, 2, 3], [1, 2, 3])
    assert len(renders) == 2


def test_a_cancelled_session_leaves_the_rendering_to_its_siblings():
    cache = TemplateCache("u")

    async def main():
        first = asyncio.create_task(cache.get("key", lambda: [1], None))
        second = asyncio.create_task(cache.get("key", lambda: [1], None))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert asyncio.run(main()) == [1]


class Parts(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        turn = [{"role": "user", "content": "more"}]
        return self.system_prompt, self.turn_separator, await self.apply_chat_template(turn, remove_system_prompt=True)


def test_a_later_turn_renders_new_messages_only(make_loop, tokenizer):
    system, separator, turn = run(make_loop, cls=Parts)
    assert tokenizer.decode(system) == "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert tokenizer.decode(separator) == "\n"
    assert tokenizer.decode(turn) == "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def test_media_are_refused(make_loop):
    async def main():
        await make_loop().apply_chat_template(MESSAGES, images=[object()])

    with pytest.raises(ContractError, match="text model"):
        asyncio.run(main())


def test_errors_of_the_server_pass_through(make_loop, recording_client):
    with pytest.raises(DataError):
        run(make_loop, recording_client(DataError("no")))
