"""The client against scripted servers, through the real balancer: budgets, continuations, waits, refusals."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlflow.utils.errors import ConfigError, DeadlineError
from rlflow.utils.ray_utils import ray_get
from rlflow.workers.rollout.base import RolloutError, TokenOutput
from rlflow.workers.rollout.llm_server import FullyAsyncLLMServerClient, GlobalRequestLoadBalancer, LLMServerClient


class Scripted:
    """Answers with pieces of the given sizes, one a call, then up to the budget; notes what it was asked."""

    def __init__(self, sizes: list[int], version: int = 1) -> None:
        self.sizes, self.version = sizes, version
        self.asked: list[tuple[int, dict[str, Any], dict[str, Any]]] = []

    async def generate(self, prompt_ids, params, request_id, timeout_s, **extra) -> TokenOutput:
        self.asked.append((len(prompt_ids), params, extra))
        if self.sizes == [-1]:
            os._exit(1)
        size, reason = (self.sizes.pop(0), "abort") if self.sizes else (params["max_tokens"], "length")
        self.version += 1
        return TokenOutput(
            token_ids=[7] * size,
            log_probs=[-1.0] * size,
            stop_reason=reason,
            extra_fields={"global_steps": self.version - 1},
        )

    async def questions(self) -> list[Any]:
        return self.asked


class World:
    """Scripted servers, a balancer and a client."""

    def __init__(self, *servers: list[int], client_cls: type = FullyAsyncLLMServerClient, **rollout: Any) -> None:
        import ray

        self.servers = [self.server(sizes) for sizes in servers]
        self.balancer: Any = (
            ray.remote(GlobalRequestLoadBalancer)
            .options(num_cpus=0, max_concurrency=1000)
            .remote({f"s{nth}": server for nth, server in enumerate(self.servers)})
        )
        values = {"name": "vllm", "ignore_eos": False, "prompt_length": 8, "response_length": 16, "max_model_len": 64}
        self.options = rollout.pop("client", {})
        self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {**values, **rollout}}, **self.options})
        self.client = client_cls(self.config, self.balancer)

    @staticmethod
    def server(sizes: list[int]) -> Any:
        import ray

        return ray.remote(Scripted).options(num_cpus=0, max_concurrency=100).remote(sizes)

    async def generate(self, prompt: int = 3, **params: Any) -> TokenOutput:
        return await self.client.generate("talk", prompt_ids=[5] * prompt, sampling_params={"logprobs": 0, **params})

    def asked(self, nth: int = 0) -> list[Any]:
        return ray_get(self.servers[nth].questions.remote(), what="questions", timeout_s=30)

    def call(self, method: str, *args: Any) -> Any:
        return ray_get(getattr(self.balancer, method).remote(*args), what=method, timeout_s=30)


@pytest.mark.parametrize("key", ["max_tokens", "max_new_tokens"])
def test_an_interrupted_answer_goes_on_with_prompt_tokens_so_far_and_what_is_left_of_the_budget(ray_cluster, key):
    world = World([4, 0, 3])
    output = asyncio.run(world.generate(**{key: 10}))
    assert len(output.token_ids) == len(output.log_probs) == 10 and output.stop_reason == "length"
    assert [(n, params["max_tokens"]) for n, params, _ in world.asked()] == [(3, 10), (7, 6), (7, 6), (10, 3)]
    assert all(key == "max_tokens" or key not in params for _, params, _ in world.asked())
    fields = output.extra_fields
    assert fields["version_spans"] == [[1, 4], [3, 3], [4, 3]]
    assert (fields["min_global_steps"], fields["max_global_steps"], fields["global_steps"]) == (1, 4, 4)


def test_without_a_budget_it_is_the_response_length_and_a_full_piece_ends_it(ray_cluster):
    world = World([16], [])
    output = asyncio.run(world.generate())
    assert len(output.token_ids) == 16 and output.stop_reason == "length"
    [(_, params, _)] = world.asked()
    assert params["max_tokens"] == 16
    world = World([6], [], max_model_len=9)  # no room for another token: no question without an answer
    assert asyncio.run(world.generate(max_tokens=16)).stop_reason == "length"


def test_partial_rollout_off_and_the_plain_client_return_what_was_there(ray_cluster):
    world = World([4], client={"async_training": {"partial_rollout": False}})
    assert asyncio.run(world.generate()).stop_reason == "abort"
    assert asyncio.run(World([4], client_cls=LLMServerClient).generate()).stop_reason == "abort"


def test_requests_wait_for_a_server_where_there_is_hope_and_are_woken_by_its_coming(ray_cluster):
    world = World()
    with pytest.raises(RolloutError, match="no rollout server is alive"):
        asyncio.run(world.generate())
    world.call("set_hope", True)

    async def scenario() -> tuple[list[Any], float]:
        calls = [asyncio.create_task(world.generate()) for _ in range(20)]
        await asyncio.sleep(0.3)
        assert not any(call.done() for call in calls)
        world.servers.append(world.server([]))
        await world.servers[0].questions.remote()  # it is up
        came = time.monotonic()
        world.balancer.add_servers.remote({"new": world.servers[0]})
        return await asyncio.gather(*calls), time.monotonic() - came

    outputs, seconds = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert len(outputs) == len(world.asked()) == 20
    assert seconds < 5, "an event, no clock"
    assert world.call("get_total_inflight") == 0


def test_hope_that_ends_reaches_those_who_wait_with_the_reason(ray_cluster):
    world = World()
    world.call("set_hope", True)

    async def scenario() -> None:
        call = asyncio.create_task(world.generate())
        await asyncio.sleep(0.2)
        world.balancer.set_hope.remote(False, "replica 0 is dead")
        await call

    with pytest.raises(RolloutError, match="no rollout server is alive, replica 0 is dead"):
        asyncio.run(asyncio.wait_for(scenario(), 30))


def test_only_hybrid_waits_without_hope_and_the_deadline_bounds_it(ray_cluster):
    world = World(request_timeout_s=0.5)
    world.client = FullyAsyncLLMServerClient(world.config, world.balancer, only_hybrid=True)
    with pytest.raises(DeadlineError, match=r"found no rollout server within rollout.request_timeout_s=0 s"):
        asyncio.run(world.generate())
    assert world.call("get_total_inflight") == 0


def test_a_request_whose_server_dies_takes_its_tokens_to_another(ray_cluster):
    world = World([4], [])
    world.servers.append(world.server([-1]))

    async def scenario() -> TokenOutput:
        first = await world.generate(max_tokens=10)  # sticky: s0
        assert len(first.token_ids) == 10
        await world.balancer.remove_servers.remote(["s0", "s1"])
        await world.balancer.add_servers.remote({"doomed": world.servers[2]})
        world.balancer.set_hope.remote(True)
        call = asyncio.create_task(world.generate(max_tokens=10))
        while "doomed" in await world.balancer.get_all_servers.remote():
            await asyncio.sleep(0.01)
        await world.balancer.add_servers.remote({"s1": world.servers[1]})
        return await call

    output = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert len(output.token_ids) == 10 and len(world.asked(1)) == 1
    assert world.call("wait_for_reports", 0, 1.0) == ["doomed"] and world.call("get_reissued") == 1
    assert world.call("get_total_inflight") == 0


def test_what_the_engine_knows_passes_and_the_rest_is_refused_before_a_server_is_asked(ray_cluster):
    world = World([], client_cls=LLMServerClient)
    given = {"min_p": 0.1, "min_tokens": 1, "max_tokens": 2}
    asyncio.run(world.client.generate("a", prompt_ids=[1], sampling_params=given, priority=3))
    asyncio.run(world.client.generate("a", prompt_ids=[1], sampling_params=given, priority=0))
    assert given == {"min_p": 0.1, "min_tokens": 1, "max_tokens": 2}
    assert [(params, extra) for _, params, extra in world.asked()] == [(given, {"priority": 3}), (given, {})]
    with pytest.raises(ConfigError, match="engine vllm cannot use heat=1"):
        asyncio.run(world.generate(heat=1))
    assert len(world.asked()) == 2
