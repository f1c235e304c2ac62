"""How the controller has the bytes moved: one call for replicas beside the trainer, two ends for the others.

NaiveTransfer     actor_wg.update_weights(mode="naive"): every rank feeds the server on its node
EngineTransfer    actor_wg.update_weights(mode=BACKEND) and the relays' update_weights, at the same time
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from rlflow.checkpoint_engine.base import CheckpointEngineRegistry
from rlflow.checkpoint_engine.phases import Phase, PhaseTimeouts
from rlflow.checkpoint_engine.receipt import WeightReceipt
from rlflow.checkpoint_engine.relays import Relays
from rlflow.checkpoint_engine.sync_run import SyncRun
from rlflow.utils.errors import WeightSyncError
from rlflow.utils.import_utils import import_external_libs
from rlflow.utils.ray_utils import ray_await

logger = logging.getLogger(__name__)

# A process that is asked for a sign of life after a failed transfer.
_ALIVE_TIMEOUT_S = 5.0
# Beyond the trainer's own deadlines, whose messages are better.
_GRACE_S = 10.0


class Transfer(ABC):
    """The phases `prepare` and `transfer` of a sync."""

    @abstractmethod
    async def prepare(self, run: SyncRun) -> None:
        """Bring the two ends together."""

    @abstractmethod
    async def run(self, run: SyncRun) -> dict[int, WeightReceipt]:
        """Move the trainer's weights to the replicas of the run; the receipts of those that are left, by rank.

        Raises:
            WeightSyncError: the trainer could not send.
        """

    def forget(self, replica: Any) -> None:
        """This replica is not managed any more."""


class NaiveTransfer(Transfer):
    """Rank `replica_rank * world_size` of the workers feeds a replica, as `bind_rollout` says."""

    def __init__(self, actor_wg: Any, timeouts: PhaseTimeouts) -> None:
        self._actor_wg, self._timeouts = actor_wg, timeouts
        self._base_in_doubt = False

    async def prepare(self, run: SyncRun) -> None:
        """There is nothing to join."""

    async def run(self, run: SyncRun) -> dict[int, WeightReceipt]:
        if not run.replicas:
            return {}
        options: dict[str, Any] = {}
        if run.partial or run.failures:
            options["ranks"] = [_leader(replica) for replica in run.replicas]
        if run.partial or self._base_in_doubt:
            options["base_sync"] = True
        self._base_in_doubt = True
        limits = self._timeouts
        limit = limits.prepare + limits.transfer + limits.verify + _GRACE_S
        answers = await group_answers(
            self._actor_wg.update_weights(run.version, mode="naive", **options), "update_weights", limit
        )
        receipts: dict[int, WeightReceipt] = {}
        for replica in list(run.replicas):
            rank = _leader(replica)
            answer = answers[rank] if rank < len(answers) else None
            if isinstance(answer, WeightReceipt):
                receipts[replica.replica_rank] = answer
                continue
            if answer is None:
                answer = WeightSyncError(f"trainer rank {rank} has no server bound to it (bind_rollout)")
            run.fail(replica, Phase.TRANSFER, answer)
        self._base_in_doubt = bool(run.failures)
        return receipts


class EngineTransfer(Transfer):
    """Replicas on devices of their own, through the checkpoint engine of that name."""

    def __init__(self, backend: str, actor_wg: Any, timeouts: PhaseTimeouts) -> None:
        self._backend, self._actor_wg, self._timeouts = backend, actor_wg, timeouts
        self._engine = CheckpointEngineRegistry.get(backend)
        self._relays = Relays(timeouts.prepare)
        self._members: tuple[Any, ...] = ()

    def forget(self, replica: Any) -> None:
        self._relays.end(replica)

    async def prepare(self, run: SyncRun) -> None:
        """A new group when the members changed, or when the last transfer failed."""
        async with run.clock.phase(Phase.PREPARE):
            await self._relays.ensure(run.replicas)
            members = tuple(replica.server_handle for replica in run.replicas)
            if members == self._members:
                return
            self._members = ()
            mine = await self._on_trainer("prepare", {})
            theirs = await self._on_relays(run, "prepare", {})
            to_actors, to_relays = self._engine.build_topology(len(mine), len(theirs), [*mine, *theirs])
            await asyncio.gather(
                self._on_trainer("init_process_group", to_actors),
                self._on_relays(run, "init_process_group", to_relays),
            )
            self._members = members

    async def run(self, run: SyncRun) -> dict[int, WeightReceipt]:
        from ray.exceptions import RayError

        await run.each(Phase.PREPARE, lambda replica: replica.release_kv_cache())
        try:
            if not run.replicas:
                return {}
            await self.prepare(run)
            async with run.clock.phase(Phase.TRANSFER):
                return await self._exchange(run)
        except (WeightSyncError, RayError) as error:  # of Ray's: a receiver died before the transfer began
            await self._blame(run, error)
            return {}
        finally:
            if run.failures:
                self._members = ()
            for replica in run.all:
                if (failure := run.failures.get(replica.replica_rank)) is not None and failure.lost:
                    self._relays.end(replica)  # dead or hung, or whatever it waits for: the next sync has a new one
            await self._finalize(run)
            await run.each(Phase.RESUME, lambda replica: replica.resume_kv_cache())

    async def _exchange(self, run: SyncRun) -> dict[int, WeightReceipt]:
        """Send and receive; the receipts that agree with the sender's."""
        asked = list(run.replicas)
        sending = asyncio.ensure_future(self._send(run.version))
        if not self._engine.streams:
            await asyncio.wait({sending}, timeout=self._timeouts.transfer)
        receiving = [self._receive(run, replica) for replica in asked]
        sent, *answers = await asyncio.gather(sending, *receiving, return_exceptions=True)
        if isinstance(sent, BaseException):
            raise sent
        receipts: dict[int, WeightReceipt] = {}
        for replica, answer in zip(asked, answers, strict=True):
            try:
                if isinstance(answer, BaseException):
                    raise answer
                sent.require_same(answer)
                receipts[replica.replica_rank] = replace(answer, metrics={**answer.metrics, **sent.metrics})
            except Exception as error:  # noqa: BLE001 - of one replica: it leaves, the others go on
                run.fail(replica, Phase.TRANSFER, _inner(error))
        return receipts

    async def _send(self, version: int) -> WeightReceipt:
        call = self._actor_wg.update_weights(version, mode=self._backend)
        for answer in await group_answers(call, "update_weights", self._timeouts.transfer):
            if isinstance(answer, WeightReceipt):
                return answer
            if isinstance(answer, WeightSyncError):
                raise answer
        raise WeightSyncError(f"no trainer rank sent weight version {version}", phase=Phase.TRANSFER.value)

    async def _receive(self, run: SyncRun, replica: Any) -> WeightReceipt:
        call = self._relays.of(replica).update_weights.remote(run.version)
        what = f"the weight receiver of rollout replica {replica.replica_rank}"
        receipt: WeightReceipt = await ray_await(call, what=what, timeout_s=self._timeouts.transfer)
        return receipt

    async def _blame(self, run: SyncRun, error: Exception) -> None:
        """The transfer to all broke off: which replicas are dead or hung? The others just did not get the version."""
        found = error if isinstance(error, WeightSyncError) else WeightSyncError(f"{type(error).__name__}: {error}")
        phase = found.phase or Phase.PREPARE.value

        async def alive(replica: Any) -> bool:
            calls = [replica.weight_version()]
            try:
                calls.append(ray_await(self._relays.of(replica).ping.remote(), what="ping", timeout_s=_ALIVE_TIMEOUT_S))
                await asyncio.wait_for(asyncio.gather(*calls), _ALIVE_TIMEOUT_S)
            except Exception as problem:  # noqa: BLE001 - whatever it is, it does not answer
                logger.info("rollout replica %d gives no sign of life: %s", replica.replica_rank, problem)
                return False
            return True

        signs = await asyncio.gather(*(alive(replica) for replica in run.replicas))
        for replica, sign in zip(list(run.replicas), signs, strict=True):
            if sign:
                same = WeightSyncError(str(found), phase=phase, tensors=found.tensors)
                run.fail(replica, Phase.TRANSFER, same)
            else:
                text = "it, or its weight receiver, is dead or hung"
                run.fail(replica, Phase.TRANSFER, WeightSyncError(text, phase=phase, lost=True))

    async def _finalize(self, run: SyncRun) -> None:
        healthy = [replica for replica in run.all if replica.replica_rank not in run.failures]
        results = await asyncio.gather(
            self._on_trainer("finalize", {}),
            *(self._relays.execute([replica], "finalize", {}, self._timeouts.commit) for replica in healthy),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                logger.warning("a checkpoint engine could not be finalized: %s", result)

    async def _on_trainer(self, method: str, kwargs: dict[str, list[Any]]) -> list[Any]:
        world = self._actor_wg.world_size
        call = self._actor_wg.execute_checkpoint_engine([method] * world, **kwargs)
        return await group_answers(call, method, self._timeouts.prepare)

    async def _on_relays(self, run: SyncRun, method: str, kwargs: dict[str, list[Any]]) -> list[Any]:
        return await self._relays.execute(run.replicas, method, kwargs, self._timeouts.prepare)


def make_transfer(backend: str, actor_wg: Any, timeouts: PhaseTimeouts, custom_module: Any = None) -> Transfer:
    """The transfer of a backend.

    Raises:
        ConfigError: nobody registered it.
    """
    if backend == "naive":
        return NaiveTransfer(actor_wg, timeouts)
    import_external_libs(custom_module)
    CheckpointEngineRegistry.require(backend)
    return EngineTransfer(backend, actor_wg, timeouts)


async def group_answers(answer: Any, method: str, timeout_s: float) -> list[Any]:
    """What each rank of a worker group answered to a call that does not block.

    Raises:
        WeightSyncError: the one that a rank raised, without the wrapping of remote calls.
    """
    what = f"{method} of the trainer"
    try:
        if hasattr(answer, "get") and not isinstance(answer, dict):  # the group's future
            return list(await asyncio.to_thread(answer.get, timeout_s))
        items = list(answer) if isinstance(answer, (list, tuple)) else [answer]
        return list(await asyncio.gather(*(_resolved(item, what, timeout_s) for item in items)))
    except Exception as error:
        found = _inner(error)
        if found is error:
            raise
        raise found from error


async def _resolved(item: Any, what: str, timeout_s: float) -> Any:
    return await ray_await(item, what=what, timeout_s=timeout_s) if hasattr(item, "__await__") else item


def _inner(error: Exception) -> Exception:
    """The weight-sync error inside an error of a remote call (the worker's, or the server's behind it)."""
    seen: BaseException | None = error
    while seen is not None:
        cause = getattr(seen, "cause", None)  # Ray's wrapper of the original exception
        for candidate in (cause, seen):
            if type(candidate) is WeightSyncError:
                return candidate
        seen = cause if isinstance(cause, BaseException) and cause is not seen else seen.__cause__
    return error


def _leader(replica: Any) -> int:
    return int(replica.replica_rank) * int(replica.world_size)
