"""The Ray actor of one embedded replica: asyncio on the outside, the engine's thread inside.

Every call that can block (loading weights, pausing, sleeping) runs in a helper thread, so that the event loop keeps
answering health checks and aborts. Handles are passed explicitly; the actor has no name to be found by.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from typing import Any

from rlflow.checkpoint_engine.base import TensorMeta, WeightReceipt
from rlflow.utils.errors import ConfigError, WeightSyncError
from rlflow.workers.rollout.base import SamplingParams, TokenOutput

logger = logging.getLogger(__name__)

# Share of the machine's memory that the caches of all replicas of a node may reserve, unless
# rollout.engine_kwargs.hf.kv_cache_gb says otherwise. Pages are used only as sequences grow.
_CACHE_SHARE = 0.25


class HFServer:
    """Token-in, token-out server of one replica.

    Args:
        rollout_config, model_config: the nodes `actor_rollout_ref.rollout` and `.model`.
        replica_rank: for messages.
        replicas_on_node: they share its cores and memory.
    """

    def __init__(self, rollout_config: Any, model_config: Any, replica_rank: int, replicas_on_node: int = 1) -> None:
        import torch

        from rlflow.utils.device import get_device
        from rlflow.workers.rollout.hf.engine import HFEngine
        from rlflow.workers.rollout.hf.model import load_model

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
        self._config, self._rank = rollout_config, replica_rank
        model = load_model(model_config, rollout_config, get_device())
        limits = engine_limits(rollout_config, model, replicas_on_node)
        version = None if rollout_config.load_format == "dummy" else 0
        # A replica's own seed, for requests that bring none.
        seed = int(rollout_config.get("seed", 0)) + replica_rank
        self._engine = HFEngine(model, limits, version=version, seed=seed)
        self._loading = threading.Lock()
        self._loaded_bytes = 0

    async def ready(self) -> dict[str, Any]:
        """Answers once the model is built: {"pid", "max_model_len", "max_num_seqs", "threads", "dtype"}."""
        import torch

        limits = self._engine.limits
        return {
            "pid": os.getpid(),
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "threads": torch.get_num_threads(),
            "dtype": str(self._engine.model.dtype),
        }

    # --- generation -----------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """Continue a prompt.

        Args:
            request_id: unique; names the request in `abort_request` and in messages.
            timeout_s: seconds until the request fails with `DeadlineError`; None = `rollout.request_timeout_s`.

        Raises:
            ContractError: bad parameters or prompt, or no usable weights.
        """
        if given := sorted(key for key, value in kwargs.items() if value):
            raise ConfigError(f"The hf rollout engine takes token ids only; it cannot use {', '.join(given)}.")
        params = SamplingParams.from_dict(sampling_params, ignore_eos=bool(self._config.ignore_eos))
        future = self._engine.submit(
            prompt_ids,
            params,
            request_id=request_id,
            timeout_s=float(timeout_s or self._config.request_timeout_s),
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
            extra_fields={"global_steps": result.version, "raw_stop_reason": result.stop_reason},
        )

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

    async def begin_update(self, version: int) -> None:
        """Start the transfer of a version; what an earlier one left unfinished is forgotten.

        Raises:
            ContractError: the engine is neither paused nor asleep.
        """
        with self._loading:
            self._engine.check_rest()
            self._engine.model.forget_arrivals()
            self._loaded_bytes = 0

    async def load_bucket(self, metas: list[TensorMeta], path: str) -> int:
        """Copy the tensors of a bucket (see `checkpoint_engine.shared_memory`) into the parameters.

        Returns the bytes loaded.

        Raises:
            WeightSyncError: an unknown tensor, a wrong shape, or memory that cannot be read.
            ContractError: the engine is neither paused nor asleep.
        """
        return await asyncio.to_thread(self._load_bucket, metas, path)

    def _load_bucket(self, metas: list[TensorMeta], path: str) -> int:
        from rlflow.checkpoint_engine.shared_memory import open_bucket

        with self._loading:
            self._engine.begin_update()
            try:
                with open_bucket(path, metas) as tensors:
                    for name, tensor in tensors:
                        self._engine.model.load(name, tensor)
                    # Views must not outlive the block.
                    tensors.clear()
                    del tensor
            except BaseException:
                self._engine.fail_update()
                raise
            size = sum(meta.size for meta in metas)
            self._loaded_bytes += size
            return size

    async def finish_update(self, version: int, tensor_count: int, checksum: int) -> WeightReceipt:
        """End an update: verify that the parameters hold what was sent, and serve them as `version`.

        Returns the receipt of what the parameters hold. When it differs from the arguments, or a parameter got
        nothing (`WeightSyncError`), the engine refuses to serve.
        """
        return await asyncio.to_thread(self._finish_update, version, tensor_count, checksum)

    def _finish_update(self, version: int, tensor_count: int, checksum: int) -> WeightReceipt:
        with self._loading:
            started = time.perf_counter()
            self._engine.begin_update()
            loaded_bytes, self._loaded_bytes = self._loaded_bytes, 0
            try:
                count, found = self._engine.model.finish()
            except WeightSyncError as error:
                self._engine.fail_update()
                raise WeightSyncError(f"Rollout replica {self._rank}, weight version {version}: {error}") from None
            if (count, found) == (tensor_count, checksum):
                self._engine.finish_update(version)
            else:
                logger.error(
                    "replica %d: weight version %d does not match: %d tensors, checksum %016x, sent %d, %016x",
                    self._rank,
                    version,
                    count,
                    found,
                    tensor_count,
                    checksum,
                )
                self._engine.fail_update()
            seconds = time.perf_counter() - started
            return WeightReceipt(version, count, loaded_bytes, found, seconds, f"Rollout replica {self._rank}")

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


def engine_limits(rollout_config: Any, model: Any, replicas_on_node: int) -> Any:
    """Sizes of the engine from the configuration and the memory of the node.

    Raises:
        ConfigError: a sequence longer than the model's positions, or a cache that holds not even one sequence.
    """
    from rlflow.utils.device import get_torch_device
    from rlflow.workers.rollout.hf.engine import EngineLimits

    config = rollout_config
    lengths = int(config.prompt_length), int(config.response_length)
    max_model_len = int(config.max_model_len or sum(lengths))
    positions = getattr(model.module.config, "max_position_embeddings", None)
    if positions and max_model_len > positions:
        raise ConfigError(
            f"rollout.max_model_len={max_model_len} (null = prompt_length + response_length) is over the model's "
            f"max_position_embeddings={positions}. Shorten prompts or responses, or take a model with a longer context."
        )
    options = (config.get("engine_kwargs") or {}).get("hf") or {}
    if options.get("kv_cache_gb") is not None:
        room = float(options.get("kv_cache_gb")) * 2**30
    else:
        room = get_torch_device().mem_get_info()[1] * _CACHE_SHARE / replicas_on_node
    sequence = model.kv_shape.bytes_per_token(model.dtype) * max_model_len
    slots = min(int(config.max_num_seqs), int(room // sequence))
    if slots < 1:
        raise ConfigError(
            f"The key-value cache may take {room / 2**30:.2f} GiB, but one sequence of rollout.max_model_len="
            f"{max_model_len} tokens needs {sequence / 2**30:.2f} GiB. Raise rollout.engine_kwargs.hf.kv_cache_gb or "
            "shorten the sequences."
        )
    if slots < config.max_num_seqs:
        logger.info(
            "%d sequences fit the key-value cache; rollout.max_num_seqs=%d is capped", slots, config.max_num_seqs
        )
    return EngineLimits(max_model_len, slots, *lengths, prefill_tokens=int(config.max_num_batched_tokens))
