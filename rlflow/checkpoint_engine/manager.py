"""The controller's view of a weight sync: which state the rollout replicas are in, and how they change it.

                 sleep_replicas                      abort_replicas
      ASLEEP <------------------- SERVING -------------------> PAUSED
         |                           ^                            |
         |       update_weights      |       update_weights       |
         +-------> UPDATING ---------+-------- UPDATING <---------+
                                     |
             pause, prepare, transfer, verify, commit; and always: resume

Invariants
    - Weights change only while no replica generates; `update_weights` pauses those that serve.
    - Each phase has a deadline (`phases`), and whatever happens, `update_weights` ends by waking the replicas and
      resuming generation, so that no caller waits for ever. A replica whose weights were touched by a failed sync
      answers requests with the reason until one succeeds; it never serves a mixture.
    - After it returns, every replica has proved by a receipt that it holds version `global_steps`. When it raises, the
      error names the phase, the replicas and the tensors; all other replicas hold and serve the version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from enum import Enum
from typing import Any, Protocol

from omegaconf import OmegaConf

from rlflow.checkpoint_engine.phases import Phase, PhaseTimeouts
from rlflow.checkpoint_engine.proof import Proof
from rlflow.checkpoint_engine.receipt import WeightReceipt
from rlflow.checkpoint_engine.sync_run import SyncRun
from rlflow.checkpoint_engine.transfer import Transfer, make_transfer
from rlflow.utils.errors import ContractError, WeightSyncError
from rlflow.utils.import_utils import load_class_from_fqn
from rlflow.utils.ray_utils import auto_await

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
    world_size: int
    server_handle: Any

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
        config: `rollout.checkpoint_engine`.
        actor_wg: worker group with the RPCs of `ActorRolloutRefWorker` (`update_weights`, `canary`, and for other
            backends than naive `execute_checkpoint_engine`).
        replicas: the replicas that these workers feed.
        backend: instead of the configured one. Hybrid replicas, which share a node with the worker that feeds them,
            take "naive" whatever is configured for those on devices of their own.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: Sequence[Any], backend: str | None = None) -> None:
        self._timeouts = PhaseTimeouts.from_config(config)
        self._replicas = list(replicas)
        self._transfer: Transfer = make_transfer(
            backend or str(config.backend), actor_wg, self._timeouts, config.get("custom_backend_module", None)
        )
        self._proof = Proof(config, actor_wg)
        self.state = SyncState.SERVING

    @auto_await
    async def update_weights(
        self, global_steps: int | None = None, replicas: Sequence[Any] | None = None
    ) -> dict[str, float]:
        """Bring replicas to the trainer's present weights, as version `global_steps`, and let them serve.

        Args:
            replicas: some of the managed ones, for example one that was started again; None: all. They end in the
                state that the others are in. Weights of a version that others hold must be the same as theirs: between
                an optimizer step and the sync that follows it, the trainer has newer ones.

        Returns:
            `bytes` and `tensor_count` of one replica, `seconds` of the whole, `version`, `replicas`, seconds of the
            phases (`pause_s` ...), where it applies `lora_modules` and `canary_error`.

        Raises:
            WeightSyncError: replicas did not get the version; they refuse generation until a sync works, the others
                serve it.
        """
        version = 0 if global_steps is None else int(global_steps)
        run = SyncRun(version, self._timeouts, self._targets(replicas), partial=replicas is not None)
        before, started = self.state, time.perf_counter()
        receipts: dict[int, WeightReceipt] = {}
        try:
            await self._pause(run)
            self.state = SyncState.UPDATING
            receipts = await self._transfer.run(run)
            await self._proof.check(run, receipts)
            await self._commit(run)
        finally:
            self.state = SyncState.UNKNOWN
            await self._reopen(run, before if run.partial else SyncState.SERVING)
        run.finish()
        return self._metrics(run, receipts, time.perf_counter() - started)

    @auto_await
    async def build_process_group(self, rollout_wg: Any = None) -> None:
        """Join trainer and receivers into a new group, for a backend that has one.

        `update_weights` does it when the replicas changed or the last sync failed; calling it before the first sync
        takes the time out of that.

        Args:
            rollout_wg: replicas that take part; None: the managed ones.
        """
        targets = self._replicas if rollout_wg is None else list(rollout_wg)
        run = SyncRun(-1, self._timeouts, targets)
        await self._transfer.prepare(run)
        run.finish()

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

    def add_replicas(self, replicas: Sequence[Any]) -> None:
        """Include further replicas; they get weights with the next sync, or with `update_weights(replicas=...)`."""
        known = {replica.replica_rank for replica in self._replicas}
        if double := [r.replica_rank for r in replicas if r.replica_rank in known]:
            raise ContractError(f"Replicas {double} are managed already.")
        self._replicas.extend(replicas)

    def remove_replicas(self, replicas: Sequence[Any]) -> None:
        """Forget replicas, for example dead ones."""
        gone = {replica.replica_rank for replica in replicas}
        for replica in [r for r in self._replicas if r.replica_rank in gone]:
            self._transfer.forget(replica)
        self._replicas = [r for r in self._replicas if r.replica_rank not in gone]

    # ---- the phases ----------------------------------------------------------------------------------------------

    def _targets(self, replicas: Sequence[Any] | None) -> list[Any]:
        if replicas is None:
            return self._replicas
        known = {replica.replica_rank for replica in self._replicas}
        if strange := [r.replica_rank for r in replicas if r.replica_rank not in known]:
            raise ContractError(f"Replicas {strange} are not managed here; add_replicas first.")
        return list(replicas)

    async def _pause(self, run: SyncRun) -> None:
        if self.state is SyncState.ASLEEP and not run.partial:
            return
        await run.each(Phase.PAUSE, lambda replica: replica.abort_all_requests())

    async def _commit(self, run: SyncRun) -> None:
        """Every replica says that it serves the version."""

        async def ask(replica: Any) -> None:
            got = await replica.weight_version()
            if got != run.version:
                raise WeightSyncError(
                    f"Rollout replica {replica.replica_rank} reports weight version {got}; expected {run.version}."
                )

        await run.each(Phase.COMMIT, ask)

    async def _reopen(self, run: SyncRun, then: SyncState) -> None:
        """Whatever happened: let the replicas of this run, also those that failed, serve or refuse."""

        async def reopen(replica: Any) -> None:
            if then is SyncState.ASLEEP:
                await replica.sleep()
                await replica.resume_generation()
                return
            await replica.wake_up()
            if then is not SyncState.PAUSED:
                await replica.resume_generation()

        lost = {rank for rank, error in run.failures.items() if error.lost}
        answering = [replica for replica in run.all if replica.replica_rank not in lost]
        answers = await run.each(Phase.RESUME, reopen, replicas=answering)
        if len(answers) == len(answering):
            self.state = then

    def _metrics(self, run: SyncRun, receipts: dict[int, WeightReceipt], seconds: float) -> dict[str, float]:
        some = next(iter(receipts.values()))
        logger.info(
            "weight version %d: %d tensors, %.0f MB to %d replicas in %.2f s",
            run.version,
            some.tensor_count,
            some.total_bytes / 1e6,
            len(receipts),
            seconds,
        )
        result = {
            "bytes": float(some.total_bytes),
            "tensor_count": float(some.tensor_count),
            "seconds": seconds,
            "version": float(run.version),
            "replicas": float(len(receipts)),
            **run.clock.metrics(),
        }
        for receipt in receipts.values():
            for name, value in receipt.metrics.items():
                result[name] = max(result.get(name, 0.0), value)
        if some.lora_modules is not None:
            result["lora_modules"] = float(len(some.lora_modules))
        return result | self._proof.metrics

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


def build_manager(
    rollout_config: Any, actor_wg: Any, replicas: Sequence[Any], backend: str | None = None
) -> CheckpointEngineManager:
    """The manager that `rollout.checkpoint_manager_class` names, or the one of this module.

    It is called as `cls(config, actor_wg, replicas)`; with `backend`, that is the one in its configuration.
    """
    config = rollout_config.checkpoint_engine
    if backend is not None:
        config = OmegaConf.merge(config, {"backend": backend})
    name = rollout_config.get("checkpoint_manager_class", None)
    cls = load_class_from_fqn(name, "rollout.checkpoint_manager_class") if name else CheckpointEngineManager
    manager: CheckpointEngineManager = cls(config, actor_wg, replicas)
    return manager
