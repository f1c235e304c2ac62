from __future__ import annotations

import asyncio
import time

import pytest

from rlflow.agent_loop import session as session_module
from rlflow.agent_loop.session import Session, SessionClient, within_deadline
from rlflow.agent_loop.settings import request_seed
from rlflow.utils.errors import DeadlineError


def test_each_turn_gets_its_seed_and_the_callers_objects_stay_as_they_are(recording_client, output_of):
    client = recording_client(output_of([1]), output_of([2]), output_of([3]))
    session = Session("e0r0a0", 1)
    own, params, prompt = SessionClient(client, session, 42), {"temperature": 1.0}, [5, 6]

    async def main():
        await own.generate("r", prompt_ids=prompt, sampling_params=params)
        await own.generate("r", prompt_ids=prompt, sampling_params=params)
        await own.generate("r", prompt_ids=prompt, sampling_params={"seed": 7})

    asyncio.run(main())
    seeds = [request.params["seed"] for request in client.requests]
    assert seeds == [request_seed(42, "e0r0a0", 1, 0), request_seed(42, "e0r0a0", 1, 1), 7]
    assert params == {"temperature": 1.0} and client.requests[0].prompt_ids is not prompt
    assert session.turns == 3 and session.tokens == 3
    assert own.requests is client.requests


def test_weight_versions_are_the_first_calls_minimum_and_the_last_calls_maximum(recording_client, output_of):
    client = recording_client(
        output_of([1], min_global_steps=3, max_global_steps=3), output_of([1], global_steps=4), output_of([1])
    )
    session = Session("u", 0)

    async def main():
        for _ in range(3):
            await SessionClient(client, session, 0).generate("r", prompt_ids=[1], sampling_params={})

    asyncio.run(main())
    assert (session.min_global_steps, session.max_global_steps) == (3, 4)


def test_a_session_over_its_deadline_names_where_it_hung(monkeypatch):
    monkeypatch.setattr(session_module, "CANCEL_GRACE_S", 0.1)

    async def main(work):
        session = Session("e0r7a0", 2)
        session.enter("generate turn 1")
        started = time.monotonic()
        with pytest.raises(DeadlineError, match=r"e0r7a0_2 took over 0\.1 s .*'generate turn 1'"):
            await within_deadline(work(), session, 0.1)
        assert session.abandoned and time.monotonic() - started < 2

    async def obedient():
        await asyncio.Event().wait()

    async def stubborn():
        for _ in range(4):
            try:
                await asyncio.sleep(0.2)
            except asyncio.CancelledError:
                pass

    asyncio.run(main(obedient))
    asyncio.run(main(stubborn))


def test_results_and_errors_in_time_pass_through():
    async def work(error=None):
        if error:
            raise error
        return 5

    assert asyncio.run(within_deadline(work(), Session("u", 0), 5.0)) == 5
    with pytest.raises(KeyError):
        asyncio.run(within_deadline(work(KeyError("x")), Session("u", 0), 5.0))
