"""The gate in front of an engine: nothing passes while it is closed, and closing it ends what runs."""

from __future__ import annotations

import asyncio

import pytest

from rlflow.utils.errors import DeadlineError
from rlflow.workers.rollout import request_gate
from rlflow.workers.rollout.request_gate import RequestGate


class Engine:
    """Requests that end when they are aborted, once the engine knows them."""

    def __init__(self) -> None:
        self.known: dict[str, asyncio.Event] = {}
        self.aborts = 0
        self.gate = RequestGate(self.abort)

    async def abort(self, ids: list[str]) -> None:
        self.aborts += 1
        for name in ids:
            if name in self.known:
                self.known[name].set()

    async def request(self, name: str, delay: float = 0.0) -> str:
        if not await self.gate.enter(name):
            return "never ran"
        try:
            await asyncio.sleep(delay)  # on its way into the engine
            self.known[name] = asyncio.Event()
            await self.known[name].wait()
            return "ran"
        finally:
            await self.gate.leave(name)


def run(scenario):
    async def main():
        return await asyncio.wait_for(scenario(Engine()), 10)

    return asyncio.run(main())


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


def test_a_pause_ends_what_runs_and_what_waits_and_lets_nothing_through():
    async def scenario(engine):
        first = asyncio.create_task(engine.request("first"))
        await until(lambda: "first" in engine.known)
        ids = await engine.gate.pause()
        late = asyncio.create_task(engine.request("late"))
        await until(lambda: engine.gate.waiting == 1)
        again = await engine.gate.pause()
        assert await first == "ran" and await late == "never ran"
        assert engine.gate.at_rest and engine.gate.waiting == 0
        after = asyncio.create_task(engine.request("after"))
        await until(lambda: engine.gate.waiting == 1)
        await engine.gate.open(paused=False)
        await until(lambda: "after" in engine.known)
        await engine.gate.abort("after")
        return ids, again, await after

    assert run(scenario) == (["first"], ["late"], "ran")


def test_a_pause_ends_a_request_that_the_engine_does_not_know_yet():
    async def scenario(engine):
        task = asyncio.create_task(engine.request("slow", delay=0.12))
        await until(lambda: engine.gate.running == 1)
        await engine.gate.pause()
        assert engine.aborts > 1
        return await task

    assert run(scenario) == "ran"


def test_sleep_lets_requests_end_and_aborts_the_late():
    async def scenario(engine):
        task = asyncio.create_task(engine.request("long"))
        await until(lambda: "long" in engine.known)
        asyncio.get_running_loop().call_later(0.05, engine.known["long"].set)
        assert await engine.gate.sleep(5.0) == [] and engine.aborts == 0
        await engine.gate.open(asleep=False)
        late = asyncio.create_task(engine.request("late"))
        await until(lambda: "late" in engine.known)
        return await engine.gate.sleep(0.01), await task, await late

    assert run(scenario) == (["late"], "ran", "ran")


def test_pause_and_sleep_are_taken_back_one_by_one():
    async def scenario(engine):
        await engine.gate.pause()
        await engine.gate.sleep(1.0)
        task = asyncio.create_task(engine.request("r"))
        await engine.gate.open(asleep=False)
        await until(lambda: engine.gate.waiting == 1)
        await asyncio.sleep(0)
        assert engine.gate.running == 0
        await engine.gate.open(paused=False)
        await until(lambda: "r" in engine.known)
        await engine.gate.abort("r")
        return await task, await engine.gate.abort("unknown")

    assert run(scenario) == ("ran", False)


def test_an_engine_that_ends_nothing_is_reported(monkeypatch):
    monkeypatch.setattr(request_gate, "_ABORT_TIMEOUT_S", 0.1)

    async def scenario(engine):
        task = asyncio.create_task(engine.request("stuck", delay=60))
        await until(lambda: engine.gate.running == 1)
        try:
            with pytest.raises(DeadlineError, match="1 requests did not end for a pause within 0 s"):
                await engine.gate.pause()
        finally:
            task.cancel()

    run(scenario)


def test_a_cancelled_request_leaves_nothing_behind():
    async def scenario(engine):
        await engine.gate.pause()
        task = asyncio.create_task(engine.request("gone"))
        await until(lambda: engine.gate.waiting == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return engine.gate.waiting, engine.gate.running

    assert run(scenario) == (0, 0)
