"""Aborts lose no token, a pause lets nothing through, and generation goes on where it stopped."""

from __future__ import annotations

import asyncio

import contract_engines as engines
import pytest
import rollout_tiny as tiny
from contract_replica import expect_log_probs

LONG = {"temperature": 0.0, "logprobs": True, "max_tokens": 500, "ignore_eos": True}
SHORT = {"temperature": 0.0, "logprobs": True, "max_tokens": 5, "ignore_eos": True}


@pytest.fixture
def prompts():
    return tiny.prompts(4, seed=20)


def test_an_aborted_request_returns_what_it_has(served, prompts):
    async def scenario():
        call = served.start(prompts[0], LONG, "to-abort")
        await served.until(running=1)
        known = await served.call("abort_request", "to-abort")
        unknown = await served.call("abort_request", "never-seen")
        return known, unknown, await served.result(call)

    known, unknown, output = asyncio.run(scenario())
    assert (known, unknown) == (True, False)
    assert output.stop_reason == "abort" and output.extra_fields["raw_stop_reason"]
    assert len(output.token_ids) == len(output.log_probs) < 500


def test_abort_all_ends_everything_and_blocks_until_resumed(served, prompts):
    async def scenario():
        calls = [served.start(prompt, LONG, f"abort-{i}") for i, prompt in enumerate(prompts)]
        await served.until(running=len(prompts))
        report = await served.call("abort_all_requests")
        outputs = [await served.result(call) for call in calls]
        late = served.start(prompts[0], SHORT, "late")
        await served.until(waiting=1)
        status = await served.call("status")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(_future(late)), 0.3)
        await served.call("resume_generation")
        return report, outputs, status, await served.result(late)

    report, outputs, status, late = asyncio.run(scenario())
    assert report["aborted_count"] == len(prompts)
    assert sorted(report["request_ids"]) == [f"abort-{i}" for i in range(len(prompts))]
    assert status["paused"] and status["running"] == 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.stop_reason == "abort" and len(output.token_ids) == len(output.log_probs)
        if output.token_ids:
            expect_log_probs(served, prompt, output)
    assert late.token_ids == engines.greedy(served.model, prompts[0], 5)


def test_abort_and_resume_equal_an_uninterrupted_generation(served, prompts):
    """Greedy tokens; the pieces are generated from the prompt and the tokens so far."""

    async def scenario():
        tokens, logs, interruptions = [], [], 0
        while len(tokens) < 200:
            call = served.start(prompts[1] + tokens, {**LONG, "max_tokens": 200 - len(tokens)})
            if interruptions < 3:
                await served.until(running=1)
                await served.call("abort_all_requests")
                await served.call("resume_generation")
                interruptions += 1
            piece = await served.result(call)
            tokens, logs = tokens + piece.token_ids, logs + piece.log_probs
        return tokens, logs

    tokens, logs = asyncio.run(scenario())
    whole = served.generate(prompts[1], {**LONG, "max_tokens": 200})
    assert tokens == whole.token_ids == engines.greedy(served.model, prompts[1], 200)
    assert logs == pytest.approx(whole.log_probs, abs=served.case.log_prob_atol)


def test_a_request_waits_while_the_engine_sleeps(served, prompts):
    async def scenario():
        running = served.start(prompts[2], {**SHORT, "max_tokens": 40})
        await served.until(running=1)
        await served.call("sleep")
        drained = await served.result(running)  # sleep lets it end
        waiting = served.start(prompts[2], SHORT)
        await served.until(waiting=1)
        status = await served.call("status")
        await served.call("wake_up")
        return drained, status, await served.result(waiting)

    drained, status, output = asyncio.run(scenario())
    assert drained.stop_reason == "length" and len(drained.token_ids) == 40
    assert status["asleep"] and status["running"] == 0
    assert output.token_ids == drained.token_ids[:5]


def test_sleeping_pausing_and_waking_twice_changes_nothing(served, prompts):
    async def scenario():
        for method in ("abort_all_requests", "abort_all_requests", "sleep", "sleep", "wake_up", "wake_up"):
            await served.call(method)
        for method in ("resume_generation", "resume_generation", "clear_kv_cache"):
            await served.call(method)

    asyncio.run(scenario())
    assert served.generate(prompts[3], SHORT).token_ids == engines.greedy(served.model, prompts[3], 5)


async def _future(ref):
    return await ref
