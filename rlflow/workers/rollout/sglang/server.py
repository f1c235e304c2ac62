"""The Ray actor of one SGLang replica: token ids in, token ids out, weights by shared memory.

Pausing and sleeping close a gate before the engine, so that SGLang's memory and weight calls, which end its scheduler
process when it is busy, are made only when nothing is left in it. The actor has no name to be found by.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from rlflow.checkpoint_engine.receipt import TensorMeta, WeightReceipt
from rlflow.utils.errors import ConfigError, ContractError, DeadlineError
from rlflow.workers.rollout.base import RolloutError, SamplingParams, TokenOutput, prompt_budget
from rlflow.workers.rollout.process_guard import kill_marked, start_guard
from rlflow.workers.rollout.request_gate import RequestGate, names
from rlflow.workers.rollout.sglang import translate
from rlflow.workers.rollout.sglang.arguments import engine_arguments, engine_environment
from rlflow.workers.rollout.sglang.engine import SGLangEngine
from rlflow.workers.rollout.sglang.weights import ServedWeights

logger = logging.getLogger(__name__)


class SGLangServer:
    """See the module.

    Args:
        rollout_config, model_config: the nodes `actor_rollout_ref.rollout` and `.model`.
        replica_rank: for messages.
        replicas_on_node: they share its cores and memory.
        own_devices: nothing but this replica computes on its devices.
    """

    def __init__(
        self,
        rollout_config: Any,
        model_config: Any,
        replica_rank: int,
        replicas_on_node: int = 1,
        own_devices: bool = False,
    ) -> None:
        from rlflow.utils.device import get_device_name

        device = get_device_name()
        os.environ.update(engine_environment(rollout_config, device))
        self._config, self._rank = rollout_config, replica_rank
        self._holder = f"Rollout replica {replica_rank}"
        self._arguments = engine_arguments(
            rollout_config,
            model_config,
            device=device,
            replica_rank=replica_rank,
            replicas_on_node=replicas_on_node,
            own_devices=own_devices,
        )
        self._mark = start_guard()
        self._engine = SGLangEngine(self._arguments)
        version = None if rollout_config.load_format == "dummy" else 0
        self._weights = ServedWeights(self._engine, self._holder, version)
        self._gate = RequestGate(self._abort_in_engine)
        self._rids: dict[str, str] = {}  # request -> its present name in the engine
        self._aborted: set[str] = set()
        self._launching: asyncio.Task[None] | None = None
        self._counts = {"prefill_tokens": 0, "shared_tokens": 0, "decode_tokens": 0}
        self._own_numbers = 0

    async def ready(self) -> dict[str, Any]:
        """Starts the engine, once; answers when it can serve.

        {"pid", "max_model_len", "max_num_seqs", "threads", "dtype", "engine", "engine_version", "address"}
        """
        import sglang
        import torch

        if self._launching is None:
            self._launching = asyncio.create_task(self._launch())
        await asyncio.shield(self._launching)
        return {
            "pid": os.getpid(),
            "max_model_len": self._arguments.max_model_len,
            "max_num_seqs": self._arguments.max_num_seqs,
            "threads": torch.get_num_threads(),
            "dtype": self._arguments.dtype,
            "engine": "sglang",
            "engine_version": sglang.__version__,
            "address": None,
        }

    async def _launch(self) -> None:
        try:
            await self._engine.start()
        except RolloutError:
            await asyncio.to_thread(kill_marked, self._mark)
            raise
        await self._engine.label(self._weights.version or 0)

    # --- generation -------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        timeout_s: float | None = None,
        session: str = "",
        turn: int = 0,
        **kwargs: Any,
    ) -> TokenOutput:
        """Continue a prompt.

        Args:
            request_id: unique; names the request in `abort_request` and in messages.
            timeout_s: seconds until the request fails with `DeadlineError`; None = `rollout.request_timeout_s`.

        Raises:
            ContractError: bad parameters or prompt, or no usable weights.
            RolloutError: the engine died, or answered with something that cannot be trained on.
        """
        if given := sorted(key for key, value in kwargs.items() if value):
            raise ConfigError(f"The sglang rollout adapter takes token ids only; it cannot use {', '.join(given)}.")
        params = SamplingParams.from_dict(sampling_params, ignore_eos=bool(self._config.ignore_eos))
        translate.check_penalty(params.repetition_penalty, "sampling_params")
        budget = self._budget(prompt_ids, params, request_id)
        self._require_usable(may_wait=True)
        limit = float(timeout_s or self._config.request_timeout_s)
        try:
            async with asyncio.timeout(limit):
                return await self._admit(prompt_ids, params, budget, request_id)
        except TimeoutError:
            raise DeadlineError(
                f"Request {request_id} had no answer within {limit:.1f} s. {self._holder}: {self._gate.running} "
                f"running, {self._gate.waiting} waiting, paused={self._gate.paused}, asleep={self._gate.asleep}. Raise "
                "rollout.request_timeout_s or lower the load."
            ) from None

    async def _admit(self, prompt_ids: list[int], params: SamplingParams, budget: int, request_id: str) -> TokenOutput:
        if not await self._gate.enter(request_id):
            return translate.token_output(
                [], [], params, "abort", "abort: before it started", [], self._weights.version
            )
        try:
            self._require_usable()  # an update may have failed meanwhile
            return await self._run(prompt_ids, params, budget, request_id)
        finally:
            self._rids.pop(request_id, None)
            self._aborted.discard(request_id)
            await asyncio.shield(self._gate.leave(request_id))

    async def _run(self, prompt_ids: list[int], params: SamplingParams, budget: int, request_id: str) -> TokenOutput:
        """Generate; again from where it stopped when that was an end-of-sequence token that the request ignores.

        SGLang cannot ignore the one and obey stop tokens of the request. Its noise depends on seed and position, so
        the pieces are what one run would have given.
        """
        size, eos = self._arguments.vocab_size, self._arguments.eos_token_ids
        own = params.logprobs and not self._arguments.raw_log_probs and translate.is_truncated(params, size)
        seed = params.seed if params.seed is not None else self._draw_seed()
        tokens: list[int] = []
        log_probs: list[float] = []
        spans: list[list[int]] = []
        while True:
            left = budget - len(tokens)
            sampling = translate.sampling_arguments(params, left, eos_token_ids=eos, vocab_size=size, seed=seed)
            # The engine aborts by prefix: no name may begin with another.
            rid = self._rids[request_id] = f"{self._number()}:{request_id}"
            answer = await self._engine.generate(
                prompt_ids + tokens,
                sampling,
                rid,
                return_logprob=params.logprobs,
                return_sampling_mask=own,
            )
            self._count(answer)
            if params.logprobs:
                log_probs += translate.log_probs_of(answer, of_support=own)
            tokens += answer["output_ids"]
            spans += translate.version_spans_of(answer)
            reason, raw = translate.stop_reason_of(answer)
            if reason == "stop" and params.ignore_eos and tokens[-1] not in params.stop_token_ids:
                if len(tokens) < budget and request_id not in self._aborted:
                    continue
                reason = "length" if len(tokens) == budget else "abort"
            if reason == "abort" and request_id not in self._aborted:
                raise RolloutError(f"{self._holder}: SGLang gave up request {request_id}: {raw}.")
            return translate.token_output(tokens, log_probs, params, reason, raw, spans, self._weights.version)

    async def prompt_log_probs(self, token_ids: list[int]) -> list[float]:
        """Log-prob of every token but the first, at temperature 1, of the whole distribution. Works while paused.

        Raises:
            ContractError: no usable weights, or the engine sleeps without its memory.
        """
        self._require_usable()
        if self._engine.released:
            raise ContractError(f"{self._holder} sleeps: wake it up before asking for log-probs.")
        self._budget(token_ids, SamplingParams(max_tokens=1), "prompt_log_probs")
        sampling = {"max_new_tokens": 0, "temperature": 0.0}
        options = {"return_logprob": True, "logprob_start_len": 0}
        async with asyncio.timeout(float(self._config.request_timeout_s)):
            answer = await self._engine.generate(token_ids, sampling, f"{self._number()}:prompt-log-probs", **options)
        return translate.prompt_log_probs_of(answer, token_ids)

    async def announce_sessions(self, sessions: list[str], keep: list[str]) -> None:
        """Of no use here: the order of service is SGLang's (`rollout.full_determinism` is refused)."""

    async def end_session(self, session: str) -> None:
        """Of no use here."""

    async def abort_request(self, request_id: str) -> bool:
        """End one request with what it has; False when it is not here."""
        return await self._gate.abort(request_id)

    async def abort_all_requests(self) -> dict[str, Any]:
        """End all requests with what they have and admit none until `resume_generation`."""
        ids = await self._gate.pause()
        await self.clear_kv_cache()
        return {"aborted_count": len(ids), "request_ids": ids}

    async def resume_generation(self) -> None:
        """Admit requests again."""
        await self._weights.close()
        await self._gate.open(paused=False)

    async def _abort_in_engine(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._aborted.add(request_id)
            if request_id in self._rids:
                self._engine.abort(self._rids[request_id])

    # --- memory -----------------------------------------------------------------------------------------------------

    async def sleep(self, drain_timeout_s: float = 60.0) -> None:
        """Let running requests end (at most that long) and free memory, if `rollout.free_cache_engine`.

        A replica with devices of its own keeps its weights. On a CPU SGLang frees nothing; the cache is emptied.
        """
        await self._rest(drain_timeout_s, self._arguments.memory_tags)

    async def release_kv_cache(self, drain_timeout_s: float = 60.0) -> None:
        """`sleep` that keeps the weights."""
        await self._rest(drain_timeout_s, ("kv_cache",))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory back (`tags`: of "weights" and "kv_cache"; None = both) and serve once all of it is there."""
        await self._engine.resume(None if tags is None else tuple(tags))
        if not self._engine.released:
            await self._gate.open(asleep=False)

    async def resume_kv_cache(self) -> None:
        """Undo `release_kv_cache`."""
        await self.wake_up(["kv_cache"])

    async def clear_kv_cache(self) -> None:
        """Forget keys and values that are kept for reuse, once nothing runs; `DeadlineError` when that does not end."""
        if "kv_cache" not in self._engine.released:
            await self._engine.flush()

    async def _rest(self, drain_timeout_s: float, tags: tuple[str, ...]) -> None:
        if late := await self._gate.sleep(drain_timeout_s):
            logger.warning("%s: aborted %s, which ran %.0f s into sleep", self._holder, names(late), drain_timeout_s)
        if bool(self._config.free_cache_engine):
            await self._engine.release(tags)
        else:
            await self.clear_kv_cache()

    # --- weights ----------------------------------------------------------------------------------------------------

    async def begin_update(self, version: int, lora: dict[str, Any] | None = None) -> None:
        """Start the transfer of a version; what an earlier one left unfinished is forgotten.

        Raises:
            ContractError: the engine is neither paused nor asleep.
            WeightSyncError: with `lora`, which announces the tensors of an adapter.
        """
        await self._weights.begin(self._gate.at_rest, lora)

    async def load_bucket(self, metas: list[TensorMeta], path: str) -> int:
        """Load the tensors of a bucket (see `checkpoint_engine.segments`). Returns the bytes loaded.

        Raises:
            WeightSyncError: an unknown tensor, a wrong shape, or memory that cannot be read.
            ContractError: the engine is neither paused nor asleep.
        """
        return await self._weights.load(metas, path, self._gate.at_rest)

    async def finish_update(self, version: int, tensor_count: int, checksum: int) -> WeightReceipt:
        """End an update: verify that the parameters hold what was sent, and serve them as `version`.

        Returns the receipt of what the parameters hold. When it differs from the arguments, or a parameter got
        nothing (`WeightSyncError`), the engine refuses to serve.
        """
        return await self._weights.finish(version, tensor_count, checksum, self._gate.at_rest)

    async def abandon_update(self) -> None:
        """Refuse to serve the present weights until the next good update."""
        await self._weights.abandon()

    async def weight_version(self) -> int | None:
        """Version of the weights; None while they are not usable."""
        return self._weights.version

    async def set_global_steps(self, version: int) -> None:
        """Relabel the present weights."""
        await self._weights.relabel(version)

    # --- health -----------------------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Counts and state. `failure` says why the engine cannot serve; None while it can."""
        return {
            "replica_rank": self._rank,
            "pid": os.getpid(),
            "running": self._gate.running,
            "waiting": self._gate.waiting,
            "paused": self._gate.paused,
            "asleep": self._gate.asleep,
            "version": self._weights.version,
            "failure": self._engine.failure,
            "kv_cache_allocated": "kv_cache" not in self._engine.released,
            **self._counts,
        }

    async def shutdown(self) -> None:
        """End the engine and all of its processes; requests that are left fail."""
        await asyncio.to_thread(self._engine.shutdown)
        await asyncio.to_thread(kill_marked, self._mark)

    # --- small things -----------------------------------------------------------------------------------------------

    def _budget(self, prompt_ids: list[int], params: SamplingParams, request_id: str) -> int:
        arguments = self._arguments
        return prompt_budget(
            prompt_ids,
            params,
            request_id,
            vocab_size=arguments.vocab_size,
            max_model_len=arguments.max_model_len,
            prompt_length=arguments.prompt_length,
            response_length=arguments.response_length,
        )

    def _require_usable(self, *, may_wait: bool = False) -> None:
        if self._engine.failure is not None:
            raise RolloutError(self._engine.failure)
        self._weights.require_usable(may_wait=may_wait)

    def _number(self) -> int:
        self._own_numbers += 1
        return self._own_numbers

    def _draw_seed(self) -> int:
        return (int(self._config.get("seed", 0)) + self._rank) * 1_000_003 + self._number()

    def _count(self, answer: dict[str, Any]) -> None:
        meta = answer["meta_info"]
        cached = int(meta.get("cached_tokens") or 0)
        self._counts["prefill_tokens"] += int(meta.get("prompt_tokens") or 0) - cached
        self._counts["shared_tokens"] += cached
        self._counts["decode_tokens"] += len(answer["output_ids"])
