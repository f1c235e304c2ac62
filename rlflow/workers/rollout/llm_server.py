"""Rollout servers as agent loops see them: a manager that starts them, a balancer, and a client.

    LLMServerClient.generate ──acquire──> GlobalRequestLoadBalancer (one actor)
             └───────────── generate ───> server of the chosen replica

Invariants
    - A server whose process died is removed, and its request is tried on another; without one left, a named error.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Collection, Sequence
from typing import Any

from rlflow.utils.errors import ConfigError, DeadlineError
from rlflow.utils.ray_utils import auto_await, ray_await, ray_get
from rlflow.workers.rollout.base import RolloutError, SamplingParams, TokenOutput, token_budget
from rlflow.workers.rollout.load_balancer import GlobalRequestLoadBalancer
from rlflow.workers.rollout.replica import RolloutReplica, get_rollout_replica_class

logger = logging.getLogger(__name__)

# What the client waits beyond the server's own deadline, which has the better message.
_GRACE_S = 15.0
_BALANCER_TIMEOUT_S = 60.0
# A server's pause between the pieces of an interrupted generation is awaited in the server's queue; a piece without
# a single token must still not become a busy loop.
_EMPTY_PIECE_PAUSE_S = 0.05


class LLMServerClient:
    """Token-in, token-out generation on whichever server has room. Small and picklable.

    Args:
        config: the whole resolved configuration (reads `actor_rollout_ref.rollout`).
        load_balancer_handle: the balancer actor.
    """

    def __init__(self, config: Any, load_balancer_handle: Any = None, **kwargs: Any) -> None:
        if kwargs:
            raise ConfigError(f"LLMServerClient knows no option {', '.join(sorted(kwargs))}.")
        rollout = config.actor_rollout_ref.rollout
        self._balancer = load_balancer_handle
        self._timeout_s = float(rollout.get("request_timeout_s", None) or 600.0)
        self._ignore_eos = bool(rollout.ignore_eos)
        self._prompt_length, self._response_length = int(rollout.prompt_length), int(rollout.response_length)
        self._max_model_len = int(rollout.max_model_len or self._prompt_length + self._response_length)

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        session: str | None = None,
        turn: int = 0,
        **kwargs: Any,
    ) -> TokenOutput:
        """Continue a prompt.

        Args:
            request_id: the conversation; its calls go to one server.
            sampling_params: see `SamplingParams`; not changed.
            session, turn: the announced session whose request number `turn` this is; it decides the server then.

        Raises:
            ContractError: bad parameters or prompt, or a server without usable weights.
            DeadlineError: no answer within `rollout.request_timeout_s`.
            RolloutError: no server is alive.
        """
        params = SamplingParams.from_dict(sampling_params, ignore_eos=self._ignore_eos)
        budget = token_budget(
            len(prompt_ids),
            params,
            max_model_len=self._max_model_len,
            prompt_length=self._prompt_length,
            response_length=self._response_length,
        )
        media = {
            "image_data": image_data,
            "video_data": video_data,
            "audio_data": audio_data,
            "mm_processor_kwargs": mm_processor_kwargs,
        }
        place = {} if session is None else {"session": session, "turn": turn}
        extra = {key: value for key, value in {**media, **kwargs, **place}.items() if value is not None}
        deadline = time.monotonic() + self._timeout_s
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"Request {request_id} got no answer within rollout.request_timeout_s={self._timeout_s:.0f} s."
                )
            output = await self._try(
                request_id, list(prompt_ids), dict(sampling_params), len(prompt_ids) + budget, left, extra
            )
            if output is not None:
                version = output.extra_fields.get("global_steps")
                output.extra_fields.setdefault("min_global_steps", version)
                output.extra_fields.setdefault("max_global_steps", version)
                return output

    def announce_sessions(self, sessions: Sequence[str], keep: Collection[str]) -> None:
        """Tell the servers which sessions are about to begin, in the order in which their requests are to be served.

        Blocks until all servers know. Each session must be ended with `end_session`.

        Args:
            sessions: names `{uid}_{number}`.
            keep: prompts (uids) of earlier announcements that still run; sessions of others are forgotten.
        """
        parts = ray_get(
            self._balancer.announce_sessions.remote(list(sessions)),
            what="the rollout load balancer",
            timeout_s=_BALANCER_TIMEOUT_S,
        )
        ray_get(
            [server.announce_sessions.remote(part, list(keep)) for server, part in parts.values()],
            what=f"{len(parts)} rollout servers to take the announcement of {len(sessions)} sessions",
            timeout_s=_BALANCER_TIMEOUT_S,
        )

    def end_session(self, session: str) -> None:
        """An announced session makes no more requests. Does not wait."""
        self._balancer.end_session.remote(session)

    async def _try(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        tokens: int,
        timeout_s: float,
        extra: dict[str, Any],
    ) -> TokenOutput | None:
        """One attempt; None when the chosen server is dead (it is removed from the balancer)."""
        from ray.exceptions import RayActorError

        call_id = f"{request_id}-{uuid.uuid4().hex[:12]}"
        server_id, server = await self._acquire(extra.get("session", request_id), tokens, call_id, timeout_s)
        answered = False
        try:
            output = await ray_await(
                server.generate.remote(prompt_ids, sampling_params, call_id, timeout_s, **extra),
                what=f"generation {call_id} on rollout server {server_id}",
                timeout_s=timeout_s + _GRACE_S,
            )
            answered = True
            return output
        except RayActorError as error:
            answered = True
            logger.warning("rollout server %s died (%s); trying another one", server_id, type(error).__name__)
            self._balancer.remove_servers.remote([server_id])
            return None
        except DeadlineError as error:
            # The server's own deadline error is a TimeoutError too; it says more than that we waited.
            inner = error.__cause__
            raise (inner if isinstance(inner, DeadlineError) else error) from None
        except Exception:
            answered = True  # the server's own error, or bad arguments
            raise
        finally:
            # Not awaited: actor calls of one process arrive in order, and a cancelled caller could not wait.
            self._balancer.release_server.remote(server_id, call_id)
            if not answered:
                server.abort_request.remote(call_id)

    async def _acquire(self, request_id: str, tokens: int, lease_id: str, timeout_s: float) -> tuple[str, Any]:
        from ray.exceptions import RayActorError

        try:
            return await ray_await(
                self._balancer.acquire_server.remote(request_id, tokens, lease_id, timeout_s + 2 * _GRACE_S),
                what="the rollout load balancer",
                timeout_s=_BALANCER_TIMEOUT_S,
            )
        except RayActorError as error:
            raise RolloutError(f"The rollout load balancer died; request {request_id} cannot be served.") from error
        except RuntimeError as error:
            if "No available servers" not in str(error):
                raise
            raise RolloutError(
                f"Request {request_id} cannot be served: no rollout server is alive. Their logs in the Ray session "
                "directory say why they ended (out of memory?)."
            ) from error


class FullyAsyncLLMServerClient(LLMServerClient):
    """Hides interruptions: a generation that a weight update aborted goes on where it stopped.

    The server queues requests while it is paused, so the continuation waits there and not in a sleep here. Because a
    token's random number depends on its position, it draws the numbers the uninterrupted one would have drawn.
    """

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """As the base class; `min_global_steps` and `max_global_steps` span all pieces."""
        params = SamplingParams.from_dict(sampling_params, ignore_eos=self._ignore_eos)
        limit = params.max_tokens or self._response_length
        merged: TokenOutput | None = None
        while True:
            done = len(merged.token_ids) if merged else 0
            piece_params = {k: v for k, v in sampling_params.items() if k not in ("max_tokens", "max_new_tokens")}
            prompt = list(prompt_ids) + (merged.token_ids if merged else [])
            piece = await super().generate(
                request_id, prompt_ids=prompt, sampling_params={**piece_params, "max_tokens": limit - done}, **kwargs
            )
            merged = _join(merged, piece)
            if len(merged.token_ids) >= limit and merged.stop_reason == "abort":
                merged.stop_reason = "length"
            if merged.stop_reason != "abort" or len(prompt_ids) + len(merged.token_ids) >= self._max_model_len:
                return merged
            if not piece.token_ids:
                await asyncio.sleep(_EMPTY_PIECE_PAUSE_S)


def _join(before: TokenOutput | None, piece: TokenOutput) -> TokenOutput:
    """Append a piece. Log-probs must be there for all tokens of a piece or for none."""
    if piece.log_probs is not None and len(piece.log_probs) != len(piece.token_ids):
        raise RolloutError(f"A server sent {len(piece.token_ids)} tokens with {len(piece.log_probs)} log-probs.")
    if before is None:
        return piece.model_copy(deep=True)
    logs = None
    if before.log_probs is not None and piece.log_probs is not None:
        logs = before.log_probs + piece.log_probs
    preempted = [p for p in (before.num_preempted, piece.num_preempted) if p is not None]
    fields = {**before.extra_fields, **piece.extra_fields}
    versions = [
        f.get(key)
        for f in (before.extra_fields, piece.extra_fields)
        for key in ("min_global_steps", "max_global_steps")
    ]
    seen = [v for v in versions if v is not None]
    if seen:
        fields["min_global_steps"], fields["max_global_steps"] = min(seen), max(seen)
    return TokenOutput(
        token_ids=before.token_ids + piece.token_ids,
        log_probs=logs,
        stop_reason=piece.stop_reason,
        num_preempted=sum(preempted) if preempted else None,
        extra_fields=fields,
    )


class LLMServerManager:
    """Starts the rollout replicas of a run. Build it with `LLMServerManager.create(...)`, awaited in a coroutine.

    Attributes:
        rollout_replicas: in order of their ranks.
        server_handles, server_addresses: of the replicas.
        global_load_balancer: the balancer actor.
    """

    def __init__(
        self, config: Any, worker_group: Any = None, rollout_resource_pool: Any = None, start_rank: int = 0
    ) -> None:
        self.config = config
        self.worker_group, self.rollout_resource_pool, self.start_rank = worker_group, rollout_resource_pool, start_rank
        rollout = config.actor_rollout_ref.rollout
        self.rollout_replica_class = get_rollout_replica_class(str(rollout.name))
        self.rollout_replicas: list[RolloutReplica] = []
        self.server_handles: list[Any] = []
        self.server_addresses: list[str | None] = []
        self.global_load_balancer: Any = None

    @classmethod
    @auto_await
    async def create(
        cls, config: Any, worker_group: Any = None, rollout_resource_pool: Any = None, start_rank: int = 0
    ) -> LLMServerManager:
        """Start replicas and balancer.

        Args:
            config: the whole configuration, resolved.
            worker_group: the actor's workers: one replica for each slice of them (hybrid mode).
            rollout_resource_pool: without `worker_group`: where to serve with weights of the model folder.
            start_rank: rank of the first replica.
        """
        manager = cls(config, worker_group, rollout_resource_pool, start_rank)
        await manager._launch_replicas()
        manager._launch_balancer()
        return manager

    async def _launch_replicas(self) -> None:
        rollout, model = self.config.actor_rollout_ref.rollout, self.config.actor_rollout_ref.model
        size = self.rollout_replica_class.world_size_for(rollout)
        if self.worker_group is not None:
            devices = len(self.worker_group.workers)
        else:
            devices = int(rollout.get("nnodes", None) or 0) * int(rollout.get("n_gpus_per_node", None) or 0)
        if devices < size or devices % size:
            raise ConfigError(
                f"{devices} devices cannot hold rollout replicas of {size} (tensor x data x pipeline parallel size). "
                "Choose parallel sizes whose product divides the number of devices"
                + (
                    "."
                    if self.worker_group is not None
                    else "; without actor workers rollout.nnodes x "
                    "rollout.n_gpus_per_node devices serve, and both must be set."
                )
            )
        per_node = int(rollout.get("n_gpus_per_node", None) or self.config.trainer.n_gpus_per_node)
        count = devices // size
        replicas = [
            self.rollout_replica_class(self.start_rank + i, rollout, model, gpus_per_node=per_node)
            for i in range(count)
        ]
        for replica in replicas:
            replica.replicas_on_node = min(count, max(1, per_node // size))
        if self.worker_group is not None:
            starts = [replica.init_hybrid(self.worker_group) for replica in replicas]
        else:
            starts = [replica.init_standalone(self.rollout_resource_pool) for replica in replicas]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await asyncio.gather(*(replica.shutdown() for replica in replicas), return_exceptions=True)
            raise
        self.rollout_replicas = replicas
        self.server_handles = [replica.server_handle for replica in replicas]
        self.server_addresses = [replica.server_address for replica in replicas]

    def _launch_balancer(self) -> None:
        import ray

        servers = {f"replica_{r.replica_rank}": r.server_handle for r in self.rollout_replicas}
        self.global_load_balancer = (
            ray.remote(GlobalRequestLoadBalancer).options(num_cpus=0, max_concurrency=1).remote(servers)
        )

    def get_client(self, client_cls: type[LLMServerClient] = LLMServerClient, **kwargs: Any) -> LLMServerClient:
        """A client of these servers; it may be sent to other processes."""
        return client_cls(self.config, self.global_load_balancer, **kwargs)

    def get_replicas(self) -> list[RolloutReplica]:
        """All replicas."""
        return self.rollout_replicas

    def get_addresses(self) -> list[str | None]:
        """HTTP addresses; None for an engine without HTTP."""
        return self.server_addresses

    def handles_by_worker(self) -> list[Any]:
        """Server handle for each worker rank, None for ranks that lead no replica: the argument of `bind_rollout`."""
        handles: list[Any] = []
        for replica in self.rollout_replicas:
            handles.extend([replica.server_handle, *([None] * (replica.world_size - 1))])
        return handles

    @auto_await
    async def shutdown(self) -> None:
        """End the servers and the balancer."""
        import ray

        await asyncio.gather(*(replica.shutdown() for replica in self.rollout_replicas))
        if self.global_load_balancer is not None:
            ray.kill(self.global_load_balancer)
            self.global_load_balancer = None
