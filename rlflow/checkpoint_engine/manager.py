"""The controller's view of a weight sync: which state the rollout replicas are in, and how they change it.

                 sleep_replicas                      abort_replicas
      ASLEEP <------------------- SERVING -------------------> PAUSED
         |                           ^                            |
         |       update_weights      |       update_weights       |
         +-------> UPDATING ---------+-------- UPDATING <---------+
                                     |
                       (wake_up_replicas, resume_generation_replicas)

Invariants
    - Weights change only while no replica generates; `update_weights` pauses those that serve.
    - Whatever happens in `update_weights`, it ends by waking the replicas and resuming generation, so that no caller
      waits for ever. A replica whose weights were touched by a failed sync answers requests with the reason until one
      succeeds; it never serves a mixture.
    - After it returns, every replica has proved by a receipt that it holds version `global_steps`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from enum import Enum
from typing import Any, Protocol

from rlflow.checkpoint_engine.base import WeightReceipt
from rlflow.utils.errors import ConfigError, ContractError, WeightSyncError
from rlflow.utils.ray_utils import auto_await, ray_await

logger = logging.getLogger(__name__)


class SyncState(Enum):
    """What the replicas do. UNKNOWN: a change of state failed half way."""

    SERVING = "serving"
    PAUSED = "paused"
    ASLEEP = "asleep"
    UPDATING = "updating"
    UNKNOWN = "unknown"


class Replica(Protocol):
    """The part of a rollout replica that the manager uses (`rlflow.workers.rollout.replica`)."""

    replica_rank: int

    async def sleep(self) -> None: ...

    async def wake_up(self) -> None: ...

    async def abort_all_requests(self) -> Any: ...

    async def resume_generation(self) -> None: ...

    async def weight_version(self) -> int | None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...


class CheckpointEngineManager:
    """Keeps rollout replicas on the trainer's weights. Methods work from plain code and from coroutines.

    Args:
        config: `rollout.checkpoint_engine` (reads `backend`, optional `timeout_s`, seconds of one sync).
        actor_wg: worker group with `update_weights(global_steps, mode)`; it returns a `WeightReceipt` or None a rank.
        replicas: the replicas that these workers feed.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: Sequence[Replica]) -> None:
        self._backend = str(config.backend)
        if self._backend != "naive":
            raise ConfigError(
                f"rollout.checkpoint_engine.backend={self._backend} is not in this version. Set it to naive: weights "
                "move through shared memory between the processes of one node."
            )
        self._timeout_s = float(config.get("timeout_s", None) or 600.0)
        self._actor_wg, self._replicas = actor_wg, list(replicas)
        self.state = SyncState.SERVING

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, float]:
        """Bring every replica to the trainer's present weights, as version `global_steps`, and let it serve.

        Returns:
            `bytes` and `tensor_count` of one replica, `seconds` of the whole, `version`, `replicas`.

        Raises:
            WeightSyncError: a replica does not hold what was sent; names it. Generation is refused until a sync works.
        """
        version = 0 if global_steps is None else int(global_steps)
        started = time.perf_counter()
        try:
            if self.state is not SyncState.ASLEEP:
                await self._all("abort_all_requests", SyncState.PAUSED)
            self.state = SyncState.UPDATING
            receipts = await self._transfer(version)
            await self._check(version, receipts)
        except BaseException as error:
            try:
                await self._reopen()
            except Exception:  # noqa: BLE001 - the error that stopped the sync is the one to report
                logger.exception("rollout replicas could not be resumed after a failed weight sync")
            if (cause := _weight_sync_error(error)) is not None and cause is not error:
                raise WeightSyncError(str(cause)) from error
            raise
        await self._reopen()
        seconds = time.perf_counter() - started
        logger.info(
            "weight version %d: %d tensors, %.0f MB to %d replicas in %.2f s",
            version,
            receipts[0].tensor_count,
            receipts[0].total_bytes / 1e6,
            len(receipts),
            seconds,
        )
        return {
            "bytes": float(receipts[0].total_bytes),
            "tensor_count": float(receipts[0].tensor_count),
            "seconds": seconds,
            "version": float(version),
            "replicas": float(len(receipts)),
        }

    @auto_await
    async def sleep_replicas(self) -> None:
        """Let running requests end and free the caches; requests that come now wait for `wake_up_replicas`."""
        await self._all("sleep", SyncState.ASLEEP)

    @auto_await
    async def wake_up_replicas(self) -> None:
        """Serve again with the weights that are there."""
        await self._all("wake_up", SyncState.SERVING)

    @auto_await
    async def abort_replicas(self) -> None:
        """End all requests with what they have, and admit none until `resume_generation_replicas`."""
        await self._all("abort_all_requests", SyncState.PAUSED)

    @auto_await
    async def resume_generation_replicas(self) -> None:
        """Admit requests again."""
        await self._all("resume_generation", SyncState.SERVING)

    @auto_await
    async def release_kv_cache_replicas(self) -> None:
        """Free the caches of replicas at rest."""
        await self._all("release_kv_cache")

    @auto_await
    async def resume_kv_cache_replicas(self) -> None:
        """Undo `release_kv_cache_replicas`."""
        await self._all("resume_kv_cache")

    def add_replicas(self, replicas: Sequence[Replica]) -> None:
        """Include further replicas; they get weights with the next sync."""
        known = {replica.replica_rank for replica in self._replicas}
        if double := [r.replica_rank for r in replicas if r.replica_rank in known]:
            raise ContractError(f"Replicas {double} are managed already.")
        self._replicas.extend(replicas)

    def remove_replicas(self, replicas: Sequence[Replica]) -> None:
        """Forget replicas, for example dead ones."""
        gone = {replica.replica_rank for replica in replicas}
        self._replicas = [r for r in self._replicas if r.replica_rank not in gone]

    async def _reopen(self) -> None:
        await self._all("wake_up")
        await self._all("resume_generation", SyncState.SERVING)

    async def _transfer(self, version: int) -> list[WeightReceipt]:
        answer = self._actor_wg.update_weights(version, mode="naive")
        if hasattr(answer, "get") and not isinstance(answer, dict):  # the group's future
            answer = await asyncio.to_thread(answer.get, self._timeout_s)
        answers = list(answer) if isinstance(answer, (list, tuple)) else [answer]
        receipts = [r for r in await asyncio.gather(*(self._result(a) for a in answers)) if r is not None]
        if len(receipts) != len(self._replicas):
            raise WeightSyncError(
                f"{len(receipts)} of {len(self._replicas)} rollout replicas got weight version {version}: "
                "a worker has no server bound to it (bind_rollout), or a replica has no worker."
            )
        return receipts

    async def _result(self, ref: Any) -> WeightReceipt | None:
        if hasattr(ref, "__await__"):
            ref = await ray_await(ref, what="update_weights of a trainer rank", timeout_s=self._timeout_s)
        return ref

    async def _check(self, version: int, receipts: list[WeightReceipt]) -> None:
        for receipt in receipts:
            receipts[0].require_same(receipt)
        versions = await asyncio.gather(*(r.weight_version() for r in self._replicas))
        for replica, got in zip(self._replicas, versions, strict=True):
            if got != version:
                raise WeightSyncError(
                    f"Rollout replica {replica.replica_rank} reports weight version {got}; expected {version}."
                )

    async def _all(self, method: str, then: SyncState | None = None) -> None:
        """Call a method on every replica. All of them are tried; the first error is raised and names its replica."""
        self.state, before = (SyncState.UNKNOWN if then is not None else self.state), self.state
        calls: list[Awaitable[Any]] = [getattr(replica, method)() for replica in self._replicas]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for replica, result in zip(self._replicas, results, strict=True):
            if isinstance(result, BaseException):
                result.add_note(
                    f"while calling {method} on rollout replica {replica.replica_rank} (was {before.value})"
                )
                raise result
        if then is not None:
            self.state = then


def _weight_sync_error(error: BaseException) -> WeightSyncError | None:
    """The weight-sync error inside an error of a remote call (the worker's, or the server's behind it)."""
    seen: BaseException | None = error
    while seen is not None:
        cause = getattr(seen, "cause", None)  # Ray's wrapper of the original exception
        for candidate in (cause, seen):
            if type(candidate) is WeightSyncError:
                return candidate
        seen = cause if isinstance(cause, BaseException) and cause is not seen else seen.__cause__
    return None
