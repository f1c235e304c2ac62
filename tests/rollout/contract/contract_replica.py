"""One replica of an engine, as a controller and a trainer see it."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Iterable
from typing import Any

import contract_engines as engines
import rollout_tiny as tiny
import torch

from rlflow.checkpoint_engine.base import WeightReceipt, build_sender
from rlflow.utils.ray_utils import ray_await
from rlflow.workers.rollout.base import TokenOutput
from rlflow.workers.rollout.replica import get_rollout_replica_class

CALL_TIMEOUT_S = 120.0


class Served:
    """A running replica and the plain model with the weights it should hold."""

    def __init__(self, case: engines.EngineCase, path: str, **rollout: Any) -> None:
        self.case, self.path = case, path
        values = {
            "name": case.name,
            "prompt_length": engines.MAX_MODEL_LEN // 2,
            "response_length": engines.MAX_MODEL_LEN // 2,
            "max_num_seqs": engines.MAX_NUM_SEQS,
            "tensor_model_parallel_size": 1,
            **case.rollout,
            **rollout,
        }
        self.config = tiny.config(path, **values).actor_rollout_ref
        self.replica = get_rollout_replica_class(case.name)(0, self.config.rollout, self.config.model, gpus_per_node=1)
        self.model = tiny.plain_model(path)
        self._numbers = itertools.count()

    def launch(self) -> Served:
        asyncio.run(self.replica.init_standalone())
        return self

    @property
    def server(self) -> Any:
        return self.replica.server_handle

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A remote method of the server, with a deadline."""
        return await ray_await(
            getattr(self.server, method).remote(*args, **kwargs), what=method, timeout_s=CALL_TIMEOUT_S
        )

    def start(self, prompt: list[int], params: dict[str, Any], request_id: str | None = None, **kwargs: Any) -> Any:
        """A generation under way: its object ref."""
        request_id = request_id or f"request-{next(self._numbers)}"
        return self.server.generate.remote(prompt, params, request_id, **kwargs)

    async def result(self, ref: Any) -> TokenOutput:
        return await ray_await(ref, what="a generation", timeout_s=CALL_TIMEOUT_S)

    def generate(self, prompt: list[int], params: dict[str, Any], **kwargs: Any) -> TokenOutput:
        return asyncio.run(self.result(self.start(prompt, params, **kwargs)))

    def generate_all(self, prompts: list[list[int]], params: dict[str, Any]) -> list[TokenOutput]:
        """All at once, in order."""

        async def run() -> list[TokenOutput]:
            return await asyncio.gather(*(self.result(self.start(p, params)) for p in prompts))

        return asyncio.run(run())

    async def until(self, **counts: int) -> None:
        """Wait until the server's status has at least these counts (`running`, `waiting`)."""

        async def poll() -> None:
            while True:
                status = await self.call("status")
                if all(status[key] >= value for key, value in counts.items()):
                    return

        await asyncio.wait_for(poll(), CALL_TIMEOUT_S)

    async def send(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightReceipt | None:
        """The trainer's end of a sync, and nothing else: the replica must be at rest."""
        return await build_sender(self.config.rollout, 0, 1).send(iter(tensors), self.server, version)

    def sync(self, version: int, model: Any = None, tensors: Iterable[Any] | None = None) -> WeightReceipt | None:
        """Pause, send the weights of `model` (or `tensors`), resume."""
        if model is not None:
            self.model = model
        tensors = list(parameters(self.model)) if tensors is None else tensors

        async def run() -> WeightReceipt | None:
            await self.call("abort_all_requests")
            try:
                return await self.send(tensors, version)
            finally:
                await self.call("resume_generation")

        return asyncio.run(run())

    def close(self) -> None:
        asyncio.run(self.replica.shutdown())


def parameters(model: Any) -> list[tuple[str, torch.Tensor]]:
    """What a trainer exports: every parameter once, under its Hugging Face name."""
    return [(name, param.detach()) for name, param in model.named_parameters()]


def changed(model: Any, seed: int) -> Any:
    """A copy whose every weight moved."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for param in other.parameters():
        param.data.add_(torch.randn(param.shape, generator=generator) * 0.05)
    return other


def expect_log_probs(served: Served, prompt: list[int], output: TokenOutput, temperature: float = 1.0) -> None:
    """The output's log-probs are those of the plain model, one for each token."""
    assert output.log_probs is not None and len(output.log_probs) == len(output.token_ids) > 0
    expected = tiny.log_probs_of(served.model, prompt, output.token_ids, temperature)
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=served.case.log_prob_atol, rtol=0)
