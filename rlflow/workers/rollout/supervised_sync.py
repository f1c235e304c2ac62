"""The weight-sync manager of a run whose replicas may die: the same methods, over whoever is there.

    trainer's thread      sleep, update_weights, ...   ─┐
                                                        ├─ one gate ──> CheckpointEngineManager
    supervisor's thread   deliver(new replica)         ─┘

When the weights of a new replica come from the trainer's processes depends on what those do:

    replicas serve     the trainer's weights are those of the version that is served, and its processes are idle: the
                       new replica gets them at once
    asleep, updating   the weights are being trained: the new replica gets them with the next `update_weights`

Invariants
    - The manager's list holds exactly the replicas that can take part in a call, and the trainer's ranks are bound to
      exactly their servers, when the call begins.
    - A call that fails because a replica died or hung is made again without it; one that fails for another reason
      fails. With nobody left it fails and names what happened to each.
    - A replica that took part in an update is probed before it gets a request, unless it served before.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rlflow.checkpoint_engine.manager import CheckpointEngineManager, SyncState
from rlflow.utils.errors import DeadlineError
from rlflow.utils.ray_utils import auto_await
from rlflow.workers.rollout.base import RolloutError
from rlflow.workers.rollout.llm_server import LLMServerManager
from rlflow.workers.rollout.replica import RolloutReplica
from rlflow.workers.rollout.supervisor import ReplicaState, ReplicaSupervisor, Watched

logger = logging.getLogger(__name__)

GATE_TIMEOUT_S = 1800.0
# Looking at every replica is bounded by hang_timeout_s; this is for the work around it.
_MARGIN_S = 120.0


class SupervisedSync:
    """See the module. Methods work from plain code and from coroutines, like the manager's.

    Args:
        manager: of all replicas, at first.
        config: `actor_rollout_ref.rollout`.
        actor_wg: the trainer's workers, with `bind_rollout`.
        server_manager: knows the present servers.
        supervisor: of the same replicas; it is told how to deliver weights.
    """

    def __init__(
        self,
        manager: CheckpointEngineManager,
        config: Any,
        actor_wg: Any,
        server_manager: LLMServerManager,
        supervisor: ReplicaSupervisor,
    ) -> None:
        self._manager, self._config, self._actor_wg = manager, config, actor_wg
        self._server_manager, self._supervisor = server_manager, supervisor
        self._gate = threading.Lock()
        self._serving = False
        self._version: int | None = None
        self._members = {w.replica.replica_rank for w in supervisor.watched}
        self._bound: set[str] = {w.replica.server_id for w in supervisor.watched}
        supervisor.deliver = self._deliver

    @property
    def state(self) -> SyncState:
        """What the replicas do."""
        return self._manager.state

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, float]:
        """See `CheckpointEngineManager`; new replicas take part and serve afterwards."""
        version = 0 if global_steps is None else int(global_steps)
        receipt = await self._call("update_weights", version)
        return dict(receipt or {})

    @auto_await
    async def sleep_replicas(self) -> None:
        """See `CheckpointEngineManager`."""
        await self._call("sleep_replicas")

    @auto_await
    async def wake_up_replicas(self) -> None:
        """See `CheckpointEngineManager`."""
        await self._call("wake_up_replicas")

    @auto_await
    async def abort_replicas(self) -> None:
        """See `CheckpointEngineManager`."""
        await self._call("abort_replicas")

    @auto_await
    async def resume_generation_replicas(self) -> None:
        """See `CheckpointEngineManager`."""
        await self._call("resume_generation_replicas")

    @auto_await
    async def release_kv_cache_replicas(self) -> None:
        """See `CheckpointEngineManager`."""
        await self._call("release_kv_cache_replicas")

    @auto_await
    async def resume_kv_cache_replicas(self) -> None:
        """See `CheckpointEngineManager`."""
        await self._call("resume_kv_cache_replicas")

    async def _call(self, method: str, *args: Any) -> Any:
        updates = method == "update_weights"
        async with self._alone(method):
            self._serving = False
            while True:
                mark = self._supervisor.losses
                present = await self._settle(new_ones_too=updates)
                try:
                    answer = await getattr(self._manager, method)(*args)
                    break
                except Exception as error:  # whose fault it was is found out first
                    lost = await self._in_supervisor(self._supervisor.examine(mark))
                    if not set(lost) & present:
                        raise
                    logger.warning("%s failed with rollout replicas %s (%s); trying without them", method, lost, error)
            if updates:
                self._version = args[0]
                await self._in_supervisor(self._supervisor.admit(present, args[0]))
            self._serving = self._manager.state is SyncState.SERVING
            return answer

    async def _settle(self, new_ones_too: bool) -> set[int]:
        """Bring manager and ranks to the replicas that take part now; their ranks.

        Raises:
            RolloutError: nobody is left.
        """
        supervisor = self._supervisor
        settings = supervisor.settings
        if new_ones_too:
            wait_s = (settings.max_restarts + 1) * settings.start_timeout_s
            await self._in_supervisor(supervisor.some_waiting(wait_s), wait_s)
        if (error := supervisor.nobody_left()) is not None:
            raise error
        states = {ReplicaState.SERVING} | ({ReplicaState.WAITING} if new_ones_too or self._version is None else set())
        present = [w.replica for w in supervisor.watched if w.state in states]
        if new_ones_too and not present:
            raise RolloutError(f"No rollout replica can take weights: {'; '.join(supervisor.describe())}.")
        ranks = {replica.replica_rank for replica in present}
        self._manager.remove_replicas([w.replica for w in supervisor.watched if w.replica.replica_rank not in ranks])
        self._manager.add_replicas([replica for replica in present if replica.replica_rank not in self._members])
        self._members = ranks
        await self._bind(present)
        return ranks

    async def _bind(self, replicas: list[RolloutReplica]) -> None:
        """Let the trainer's ranks feed exactly these."""
        wanted = {replica.server_id for replica in replicas}
        if wanted != self._bound:
            self._bound = set()
            ranks = {replica.replica_rank for replica in replicas}
            handles = self._server_manager.handles_by_worker(only=ranks)
            await asyncio.to_thread(self._actor_wg.bind_rollout, handles)
            self._bound = wanted

    async def _deliver(self, w: Watched) -> bool:
        """In the supervisor's thread: give a waiting replica the weights that are served, if the trainer rests."""
        if not self._serving or not self._gate.acquire(blocking=False):
            return False  # whoever holds the gate wakes the supervisor afterwards
        try:
            if not self._serving or self._version is None or w.state is not ReplicaState.WAITING:
                return False
            await self._send(w.replica, self._version)
            await self._supervisor.prove(w, self._version)
            return True
        finally:
            self._gate.release()

    async def _send(self, replica: RolloutReplica, version: int) -> None:
        """The trainer's present weights to one replica at rest; the others go on serving."""
        await self._bind([replica])
        alone = CheckpointEngineManager(self._config.checkpoint_engine, self._actor_wg, [replica])
        alone.state = SyncState.ASLEEP
        await alone.update_weights(version)

    @asynccontextmanager
    async def _alone(self, what: str) -> AsyncIterator[None]:
        if not await asyncio.to_thread(self._gate.acquire, True, GATE_TIMEOUT_S):
            raise DeadlineError(f"{what} waited {GATE_TIMEOUT_S:.0f} s for the weights of a new rollout replica.")
        try:
            yield
        finally:
            self._gate.release()
            self._supervisor.wake()

    async def _in_supervisor(self, work: Any, wait_s: float = 0.0) -> Any:
        settings = self._supervisor.settings
        limit = wait_s + settings.hang_timeout_s + settings.ready_timeout_s + _MARGIN_S
        return await self._supervisor.in_its_thread(work, limit)
