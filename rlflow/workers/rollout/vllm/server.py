"""The Ray actor of one vLLM replica: our contract on the outside, AsyncLLM and its processes inside.

    actor (this) ──> EngineCore (scheduler) ──> one worker process a device

Nothing blocks the event loop: the engine starts in a thread, so that health checks are answered while it does.
"""

from __future__ import annotations

import asyncio
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rlflow.checkpoint_engine.base import TensorMeta, WeightReceipt
from rlflow.utils.errors import ConfigError, ContractError, DeadlineError
from rlflow.workers.rollout.base import RolloutError, SamplingParams, TokenOutput, prompt_budget
from rlflow.workers.rollout.capabilities import check_request
from rlflow.workers.rollout.hf.model import eos_token_ids
from rlflow.workers.rollout.process_guard import kill_marked, start_guard
from rlflow.workers.rollout.request_gate import RequestGate, names
from rlflow.workers.rollout.vllm.engine_args import build_engine_args
from rlflow.workers.rollout.vllm.sampling import aborted_before_start, engine_sampling, read_sampling, token_output
from rlflow.workers.rollout.vllm.weights import WeightDoor

logger = logging.getLogger(__name__)

_RPC_TIMEOUT_S = 300.0


class VLLMServer:
    """Token-in, token-out server of one replica.

    Args:
        rollout_config, model_config: the nodes `actor_rollout_ref.rollout` and `.model`.
        replica_rank: for messages, and part of the seed.
        replicas_on_node: they share its memory.
        mode: value of the replica's `RolloutMode`; decides how deep it sleeps.
    """

    def __init__(
        self,
        rollout_config: Any,
        model_config: Any,
        replica_rank: int,
        replicas_on_node: int = 1,
        mode: str = "hybrid",
    ) -> None:
        from rlflow.utils.device import get_device_name

        self._config, self._rank = rollout_config, replica_rank
        self._device, self._mode = get_device_name(), mode
        self._args = build_engine_args(
            rollout_config,
            model_config,
            replica_rank=replica_rank,
            device=self._device,
            replicas_on_node=replicas_on_node,
        )
        self._mark = start_guard()
        self._holder = f"Rollout replica {replica_rank}"
        version = None if self._args["load_format"] == "dummy" else 0
        self._gate = RequestGate(self._abort_in_engine)
        self._weights = WeightDoor(self._call_workers, self.clear_kv_cache, self._holder, version)
        self._eos = _end_tokens(model_config)
        self._engine: Any = None
        self._memory_asleep = False
        self._own_requests = 0
        self._starting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-start").submit(self._start)

    def _start(self) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**self._args))

    async def ready(self) -> dict[str, Any]:
        """Answers once the engine is up; what it is.

        {"pid", "max_model_len", "max_num_seqs", "threads", "dtype", "engine", "engine_version", "address", "workers"}
        """
        import vllm

        try:
            self._engine = await asyncio.wrap_future(self._starting)
        except Exception as error:
            kill_marked(self._mark)
            raise RolloutError(
                f"{self._holder}: vLLM did not start: {type(error).__name__}: {error}. The lines of EngineCore and "
                "Worker above it in this actor's log (Ray session directory) have the cause."
            ) from error
        workers = await self._call_workers("rlflow_facts")
        model = self._engine.model_config
        return {
            "pid": os.getpid(),
            "max_model_len": int(model.max_model_len),
            "max_num_seqs": int(self._engine.scheduler_config.max_num_seqs),
            "threads": sum(worker["threads"] for worker in workers),
            "dtype": str(model.dtype),
            "engine": "vllm",
            "engine_version": vllm.__version__,
            "address": None,
            "workers": workers,
        }

    # --- generation -----------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        timeout_s: float | None = None,
        session: str = "",
        turn: int = 0,
        priority: int = 0,
        **kwargs: Any,
    ) -> TokenOutput:
        """Continue a prompt.

        Args:
            request_id: unique; names the request in `abort_request` and in messages.
            timeout_s: seconds until the request fails with `DeadlineError`; None = `rollout.request_timeout_s`.
            priority: lower is served earlier; needs `rollout.scheduling_policy=priority`.

        Raises:
            ContractError: bad parameters or prompt, or no usable weights.
            RolloutError: the engine died.
        """
        check_request("vllm", {}, kwargs)
        if priority and self._args["scheduling_policy"] != "priority":
            raise ConfigError(
                f"priority={priority} needs rollout.scheduling_policy=priority (now: "
                f"{self._args['scheduling_policy']})."
            )
        params, own = read_sampling(sampling_params, ignore_eos=bool(self._config.ignore_eos))
        max_tokens = self._check_prompt(prompt_ids, params, request_id)
        sampling = engine_sampling(params, max_tokens, self._eos, own)
        self._weights.require_usable()
        limit = float(timeout_s or self._config.request_timeout_s)
        try:
            async with asyncio.timeout(limit):
                return await self._admit(prompt_ids, sampling, params.logprobs, request_id, priority)
        except TimeoutError:
            raise DeadlineError(
                f"Request {request_id} had no answer within {limit:.1f} s. {self._holder}: "
                f"{self._gate.running} running, {self._gate.waiting} waiting, paused={self._gate.paused}, "
                f"asleep={self._gate.asleep}."
            ) from None

    async def _admit(
        self, prompt_ids: list[int], sampling: Any, wants_log_probs: bool, request_id: str, priority: int
    ) -> TokenOutput:
        if not await self._gate.enter(request_id):
            return aborted_before_start(self._weights.version, wants_log_probs=wants_log_probs)
        try:
            self._weights.require_usable()  # an update may have failed meanwhile
            version = self._weights.version
            answer = await self._run(prompt_ids, sampling, request_id, priority)
            return token_output(answer, wants_log_probs=wants_log_probs, version=version)
        finally:
            await asyncio.shield(self._gate.leave(request_id))

    async def _run(self, prompt_ids: list[int], sampling: Any, request_id: str, priority: int = 0) -> Any:
        """vLLM's last output of a request. Cancelled, it aborts the request."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        last = None
        try:
            async for output in self._engine.generate(
                {"prompt_token_ids": list(prompt_ids)}, sampling, request_id, priority=priority
            ):
                last = output
        except EngineDeadError as error:
            raise RolloutError(f"{self._holder}: vLLM's engine process died ({error}).") from error
        except EngineGenerateError as error:  # an engine that dies may not be known to be dead yet
            raise RolloutError(
                f"{self._holder}: vLLM's engine process died, or gave up request {request_id} ({error.__cause__})."
            ) from error
        if last is None:
            raise RolloutError(f"{self._holder}: vLLM ended request {request_id} without an answer.")
        return last

    def _check_prompt(self, prompt_ids: list[int], params: SamplingParams, request_id: str) -> int:
        return prompt_budget(
            prompt_ids,
            params,
            request_id,
            vocab_size=self._require_engine().model_config.get_vocab_size(),
            max_model_len=int(self._args["max_model_len"]),
            prompt_length=int(self._config.prompt_length),
            response_length=int(self._config.response_length),
        )

    async def prompt_log_probs(self, token_ids: list[int]) -> list[float]:
        """Log-prob of every token but the first, at temperature 1, of the whole distribution. Works while paused.

        Raises:
            ContractError: no usable weights.
        """
        from vllm import SamplingParams as EngineSampling

        params = SamplingParams(max_tokens=1)
        self._check_prompt(token_ids, params, "prompt_log_probs")
        self._weights.require_usable()
        if self._weights.version is None or self._memory_asleep:
            raise ContractError(
                f"{self._holder} has no weights in memory to score with: finish the update, wake it up."
            )
        # Scores of a prompt that comes out of the prefix cache would be missing; vLLM leaves the cache aside here.
        sampling = EngineSampling(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        self._own_requests += 1
        async with asyncio.timeout(float(self._config.request_timeout_s)):
            answer = await self._run(token_ids, sampling, f"prompt-log-probs-{self._own_requests}")
        rows = answer.prompt_logprobs[1:]
        return [float(row[token].logprob) for row, token in zip(rows, token_ids[1:], strict=True)]

    async def announce_sessions(self, sessions: list[str], keep: list[str]) -> None:
        """Of no use here: the order of service is vLLM's (`rollout.full_determinism` is refused)."""

    async def end_session(self, session: str) -> None:
        """Of no use here."""

    async def abort_request(self, request_id: str) -> bool:
        """End one request with what it has; False when it is not here."""
        return await self._gate.abort(request_id)

    async def abort_all_requests(self) -> dict[str, Any]:
        """End all requests with what they have and admit none until `resume_generation`."""
        self._require_engine()
        ids = await self._gate.pause()
        return {"aborted_count": len(ids), "request_ids": ids}

    async def resume_generation(self) -> None:
        """Admit requests again."""
        self._weights.end_waiting()
        await self._gate.open(paused=False)

    async def _abort_in_engine(self, request_ids: list[str]) -> None:
        await self._require_engine().abort(request_ids)

    # --- memory ---------------------------------------------------------------------------------------------------

    async def sleep(self, drain_timeout_s: float = 60.0) -> None:
        """Let running requests end (at most that long) and free memory, if `rollout.free_cache_engine`.

        On a GPU a hybrid replica gives up weights and cache (level 2; level 1, weights kept in host memory, where they
        do not come again), others only the cache's contents. On a CPU vLLM cannot: nothing is freed.
        """
        engine = self._require_engine()
        if late := await self._gate.sleep(drain_timeout_s):
            logger.warning("%s: aborted %s, which ran %.0f s into sleep", self._holder, names(late), drain_timeout_s)
        await self.clear_kv_cache()
        if self._sleeps_deep and not self._memory_asleep:
            self._memory_asleep = True
            await engine.sleep(level=self._sleep_level())

    @property
    def _sleeps_deep(self) -> bool:
        return bool(self._device != "cpu" and self._config.free_cache_engine and self._mode != "standalone")

    def _sleep_level(self) -> int:
        return 2 if self._mode == "hybrid" else 1

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Serve again. `tags`: of "weights" and "kv_cache"; None = both."""
        await self._wake_memory(tags)
        if not self._memory_asleep:
            await self._gate.open(asleep=False)

    async def _wake_memory(self, tags: list[str] | None) -> None:
        if self._memory_asleep and await self._require_engine().wake_up(tags):
            self._memory_asleep = False
            await self.clear_kv_cache()

    async def clear_kv_cache(self) -> None:
        """Forget keys and values that are kept for reuse."""
        if not await self._require_engine().reset_prefix_cache():
            raise RolloutError(f"{self._holder}: vLLM did not empty its prefix cache; requests still use it.")

    release_kv_cache = sleep

    resume_kv_cache = wake_up

    # --- weights --------------------------------------------------------------------------------------------------

    async def begin_update(self, version: int) -> None:
        """Start the transfer of a version; what an earlier one left unfinished is forgotten.

        Raises:
            ContractError: the engine is neither paused nor asleep.
        """
        await self._weights.begin(self._gate.at_rest)
        await self._wake_memory(["weights"])

    async def load_bucket(self, metas: list[TensorMeta], path: str) -> int:
        """Load the tensors of a bucket (see `checkpoint_engine.segments`). Returns the bytes loaded.

        Raises:
            WeightSyncError: an unknown tensor, a wrong shape, or memory that cannot be read.
            ContractError: the engine is neither paused nor asleep.
        """
        return await self._weights.load(metas, path, self._gate.at_rest)

    async def finish_update(self, version: int, tensor_count: int, checksum: int) -> WeightReceipt:
        """End an update: verify that what was sent arrived for every parameter, and serve it as `version`.

        Returns the receipt of what arrived. When it differs from the arguments, or a parameter got nothing
        (`WeightSyncError`), the engine refuses to serve.
        """
        return await self._weights.finish(version, tensor_count, checksum)

    async def abandon_update(self) -> None:
        """Refuse to serve the present weights until the next good update."""
        await self._weights.abandon()

    async def weight_version(self) -> int | None:
        """Version of the weights; None while they are not usable."""
        return self._weights.version

    async def set_global_steps(self, version: int) -> None:
        """Relabel the present weights."""
        if self._weights.version is not None:
            self._weights.version = version

    async def _call_workers(self, method: str, *args: Any) -> list[dict[str, Any]]:
        engine = self._require_engine()
        async with asyncio.timeout(_RPC_TIMEOUT_S):
            return list(await engine.collective_rpc(method, args=args))

    # --- health ---------------------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Counts and state. `failure` says why the engine cannot serve; None while it can."""
        failure = None
        if self._engine is not None and self._engine.errored:
            failure = f"vLLM's engine process died: {self._engine.dead_error}"
        return {
            "replica_rank": self._rank,
            "pid": os.getpid(),
            "starting": self._engine is None,
            "running": self._gate.running,
            "waiting": self._gate.waiting,
            "paused": self._gate.paused,
            "asleep": self._gate.asleep,
            "version": self._weights.version,
            "failure": failure,
            "kv_cache_allocated": self._engine is not None and not self._memory_asleep,
        }

    async def shutdown(self) -> None:
        """End the engine and all of its processes; requests that are left fail."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(partial(engine.shutdown, timeout=2.0))
        await asyncio.to_thread(kill_marked, self._mark)

    def _require_engine(self) -> Any:
        if self._engine is None:
            raise RolloutError(f"{self._holder} has no engine: it is starting, was shut down, or failed to start.")
        if self._engine.errored:
            raise RolloutError(f"{self._holder}: vLLM's engine process died: {self._engine.dead_error}")
        return self._engine


def _end_tokens(model_config: Any) -> frozenset[int]:
    """The same end-of-sequence tokens as the embedded engine takes."""
    from transformers import AutoConfig

    path = str(Path(str(model_config.path)).expanduser())
    trust = bool(model_config.get("trust_remote_code", False))
    source = str(Path(str(model_config.get("hf_config_path") or path)).expanduser())
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust)
    with suppress(AttributeError):
        config.eos_token_id = (model_config.get("override_config") or {}).get("eos_token_id", config.eos_token_id)
    return eos_token_ids(path, config, str(model_config.get("tokenizer_path") or path), trust)
