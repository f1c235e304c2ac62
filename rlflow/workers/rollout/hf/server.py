"""The Ray actor of one embedded replica: asyncio on the outside, the engine's thread inside.

Nothing blocks the event loop, so that it keeps answering health checks and aborts: generation and weight updates are
futures of the engine's thread, pausing and sleeping wait in a helper thread. Handles are passed explicitly; the actor
has no name to be found by.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from rlflow.checkpoint_engine.base import TensorMeta, WeightReceipt
from rlflow.utils.errors import WeightSyncError
from rlflow.workers.rollout.base import SamplingParams, TokenOutput
from rlflow.workers.rollout.capabilities import check_request

if TYPE_CHECKING:
    from rlflow.workers.rollout.hf.model import ServedModel

logger = logging.getLogger(__name__)
# The engine's thread begins the next bucket while the answer for the last one is on its way.
_BUCKETS_AT_ONCE = 2


class HFServer:
    """Token-in, token-out server of one replica.

    Args:
        rollout_config, model_config: the nodes `actor_rollout_ref.rollout` and `.model`.
        replica_rank: for messages.
        replicas_on_node: they share its cores and memory.
    """

    def __init__(self, rollout_config: Any, model_config: Any, replica_rank: int, replicas_on_node: int = 1) -> None:
        import torch

        from rlflow.utils.determinism import enable_full_determinism
        from rlflow.utils.device import get_device
        from rlflow.workers.rollout.hf.admission import FirstCome, Rounds
        from rlflow.workers.rollout.hf.engine import HFEngine
        from rlflow.workers.rollout.hf.limits import engine_limits
        from rlflow.workers.rollout.hf.model import load_model

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
        self._config, self._rank = rollout_config, replica_rank
        deterministic = bool(rollout_config.get("full_determinism", False))
        if deterministic:
            enable_full_determinism(int(rollout_config.get("seed", 0)))
        # In a thread that ends, so that its pool of OpenMP threads ends too: see `weight_updates`.
        with ThreadPoolExecutor(max_workers=1) as pool:
            model = pool.submit(load_model, model_config, rollout_config, get_device()).result()
        limits = engine_limits(rollout_config, model, replicas_on_node)
        version = None if rollout_config.load_format == "dummy" else 0
        # A replica's own seed, for requests that bring none.
        seed = int(rollout_config.get("seed", 0)) + replica_rank
        admission = Rounds() if deterministic else FirstCome()
        self._engine = HFEngine(model, limits, version=version, seed=seed, admission=admission)
        self._loaded_bytes = 0

    async def ready(self) -> dict[str, Any]:
        """Answers once the model is built: process, limits, precision and engine."""
        import torch
        import transformers

        limits = self._engine.limits
        return {
            "pid": os.getpid(),
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "threads": torch.get_num_threads(),
            "dtype": str(self._engine.model.dtype),
            "engine": "hf",
            "engine_version": transformers.__version__,
            "address": None,
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
        **kwargs: Any,
    ) -> TokenOutput:
        """Continue a prompt.

        Args:
            request_id: unique; names the request in `abort_request` and in messages.
            timeout_s: seconds until the request fails with `DeadlineError`; None = `rollout.request_timeout_s`.
            session, turn: the announced session that asks, and the number of this request of it.

        Raises:
            ContractError: bad parameters or prompt, or no usable weights.
        """
        check_request("hf", {}, kwargs)
        params = SamplingParams.from_dict(sampling_params, ignore_eos=bool(self._config.ignore_eos))
        future = self._engine.submit(
            prompt_ids,
            params,
            request_id=request_id,
            timeout_s=float(timeout_s or self._config.request_timeout_s),
            session=session,
            turn=turn,
        )
        try:
            result = await asyncio.wrap_future(future)
        except asyncio.CancelledError:  # the caller gave up: do not compute for nobody
            self._engine.abort(request_id)
            raise
        return TokenOutput(
            token_ids=result.token_ids,
            log_probs=result.log_probs if params.logprobs else None,
            stop_reason=result.stop_reason,
            extra_fields={
                "global_steps": result.version,
                "raw_stop_reason": result.stop_reason,
                "version_spans": [[result.version, len(result.token_ids)]] if result.token_ids else [],
            },
        )

    async def announce_sessions(self, sessions: list[str], keep: list[str]) -> None:
        """Expect requests of these sessions; of those announced before, only prompts in `keep` still run."""
        self._engine.announce(sessions, keep)

    async def end_session(self, session: str) -> None:
        """This session makes no more requests."""
        self._engine.end_session(session)

    async def abort_request(self, request_id: str) -> bool:
        """End one request with what it has; False when it is not here."""
        return self._engine.abort(request_id)

    async def abort_all_requests(self) -> dict[str, Any]:
        """End all requests with what they have and admit none until `resume_generation`."""
        ids = await asyncio.to_thread(self._engine.pause)
        return {"aborted_count": len(ids), "request_ids": ids}

    async def resume_generation(self) -> None:
        """Admit requests again."""
        self._engine.resume()

    # --- memory ---------------------------------------------------------------------------------------------------

    async def sleep(self, drain_timeout_s: float = 60.0) -> None:
        """Let running requests end (at most that long) and free the cache, if `rollout.free_cache_engine`."""
        await asyncio.to_thread(self._engine.sleep, drain_timeout_s, free=bool(self._config.free_cache_engine))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Serve again. The cache is allocated by the first request; `tags` are accepted for compatibility."""
        self._engine.wake_up()

    async def clear_kv_cache(self) -> None:
        """Nothing to clear: no key or value is kept after its request."""

    release_kv_cache = sleep

    resume_kv_cache = wake_up

    # --- weights --------------------------------------------------------------------------------------------------

    async def begin_update(self, version: int, lora: dict[str, Any] | None = None) -> int:
        """Start the transfer of a version; what an earlier one left unfinished is forgotten.

        With `lora`, PEFT's config as a dict, the tensors are those of an adapter, and the base weights stay.
        Returns how many calls of `load_bucket` may be under way at once.

        Raises:
            ContractError: the engine is neither paused nor asleep.
        """
        await asyncio.wrap_future(self._engine.start_update(lora))
        self._loaded_bytes = 0
        return _BUCKETS_AT_ONCE

    async def load_bucket(self, metas: list[TensorMeta], path: str) -> int:
        """Copy the tensors of a bucket (see `checkpoint_engine.segments`) into the parameters.

        Returns the bytes loaded.

        Raises:
            WeightSyncError: an unknown tensor, a wrong shape, or memory that cannot be read.
            ContractError: the engine is neither paused nor asleep.
        """
        await asyncio.wrap_future(self._engine.load_weights(partial(copy_bucket, metas, path)))
        size = sum(meta.size for meta in metas)
        self._loaded_bytes += size
        return size

    async def finish_update(self, version: int, tensor_count: int, checksum: int) -> WeightReceipt:
        """End an update: verify that the parameters hold what was sent, and serve them as `version`.

        Returns the receipt of what the parameters hold. When it differs from the arguments, or a parameter got
        nothing (`WeightSyncError`), the engine refuses to serve.
        """
        started = time.perf_counter()
        try:
            found = await asyncio.wrap_future(self._engine.finish_update(version, tensor_count, checksum))
        except WeightSyncError as error:
            error.args = (f"Rollout replica {self._rank}, weight version {version}: {error}",)
            raise
        if found != (tensor_count, checksum):
            logger.error(
                "replica %d: weight version %d holds %s, sent %s", self._rank, version, found, (tensor_count, checksum)
            )
        model = self._engine.model
        return WeightReceipt(
            version,
            found[0],
            self._loaded_bytes,
            found[1],
            time.perf_counter() - started,
            f"Rollout replica {self._rank}",
            names=model.loaded,
            lora_modules=model.lora_modules,
        )

    async def abandon_update(self) -> None:
        """Refuse to serve the present weights until the next good update."""
        self._engine.abandon_update()

    async def prompt_log_probs(self, token_ids: list[int]) -> list[float]:
        """Log-prob of every token but the first under the present weights (temperature 1)."""
        return await asyncio.wrap_future(self._engine.prompt_log_probs(token_ids))

    async def weight_version(self) -> int | None:
        """Version of the weights; None while they are not usable."""
        return self._engine.version

    async def set_global_steps(self, version: int) -> None:
        """Relabel the present weights."""
        self._engine.set_version(version)

    # --- health ---------------------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Counts and state of the engine."""
        return {"replica_rank": self._rank, "pid": os.getpid(), **self._engine.status()}

    async def shutdown(self) -> None:
        """Stop the engine; requests that are left fail."""
        await asyncio.to_thread(self._engine.shutdown)


def copy_bucket(metas: list[TensorMeta], path: str, model: ServedModel) -> None:
    """Load the tensors of a bucket into the model's parameters."""
    from rlflow.checkpoint_engine.cores import half_of_the_cores
    from rlflow.checkpoint_engine.segments import open_bucket

    digests = {meta.name: meta.digest for meta in metas}
    # Nothing is verified on opening: what counts is what the parameters hold in the end.
    with half_of_the_cores(), open_bucket(path, metas, verify=False) as tensors:
        while tensors:  # views must not outlive the block
            name, tensor = tensors.pop()
            model.load(name, tensor, digests[name])
