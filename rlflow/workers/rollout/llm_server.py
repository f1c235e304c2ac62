"""Rollout servers as a run sees them: the manager that starts replicas and balancer, and hands out clients.

LLMServerClient.generate ──lease──> GlobalRequestLoadBalancer (one actor)
         └──────────── generate ──> server of the chosen replica
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Any

from rlflow.utils.errors import ConfigError
from rlflow.utils.ray_utils import auto_await
from rlflow.workers.rollout.llm_client import FullyAsyncLLMServerClient, LLMServerClient
from rlflow.workers.rollout.load_balancer import GlobalRequestLoadBalancer
from rlflow.workers.rollout.replica import RolloutReplica, get_rollout_replica_class

__all__ = ["FullyAsyncLLMServerClient", "GlobalRequestLoadBalancer", "LLMServerClient", "LLMServerManager"]

logger = logging.getLogger(__name__)

# Requests that may be with the balancer at once; those that wait for a server wait there.
_BALANCER_CONCURRENCY = 100_000


class LLMServerManager:
    """Starts the rollout replicas of a run. Build it with `LLMServerManager.create(...)`, awaited in a coroutine.

    Attributes:
        rollout_replica_class: of the engine; a subclass may preset it.
        rollout_replicas: in order of their ranks.
        global_load_balancer: the balancer actor.
    """

    rollout_replica_class: type[RolloutReplica] | None = None

    def __init__(
        self, config: Any, worker_group: Any = None, rollout_resource_pool: Any = None, start_rank: int = 0
    ) -> None:
        self.config = config
        self.worker_group, self.rollout_resource_pool, self.start_rank = worker_group, rollout_resource_pool, start_rank
        if self.rollout_replica_class is None:
            self.rollout_replica_class = get_rollout_replica_class(str(config.actor_rollout_ref.rollout.name))
        self.rollout_replicas: list[RolloutReplica] = []
        self.global_load_balancer: Any = None

    @property
    def server_handles(self) -> list[Any]:
        """Of the replicas that have a server now."""
        return [replica.server_handle for replica in self.rollout_replicas if replica.servers]

    @property
    def server_addresses(self) -> list[str | None]:
        """Their HTTP addresses; None for an engine without HTTP."""
        return [replica.server_address for replica in self.rollout_replicas if replica.servers]

    @classmethod
    @auto_await
    async def create(
        cls, config: Any, worker_group: Any = None, rollout_resource_pool: Any = None, start_rank: int = 0
    ) -> LLMServerManager:
        """Start replicas and balancer.

        Args:
            config: the whole configuration, resolved.
            worker_group: the actor's workers: one replica for each slice of them (hybrid mode).
            rollout_resource_pool: without `worker_group`: a pool to divide among standalone replicas; None: each makes
                its own, `rollout.nnodes` x `rollout.n_gpus_per_node` devices together.
            start_rank: rank of the first replica.
        """
        manager = cls(config, worker_group, rollout_resource_pool, start_rank)
        await manager._launch_replicas()
        manager._launch_balancer()
        return manager

    async def _launch_replicas(self) -> None:
        assert self.rollout_replica_class is not None
        rollout, model = self.config.actor_rollout_ref.rollout, self.config.actor_rollout_ref.model
        size = self.rollout_replica_class.world_size_for(rollout)
        own = self.worker_group is None and rollout.get("n_gpus_per_node", None)
        per_node = int(own or self.config.trainer.n_gpus_per_node)
        count = self._devices(per_node, size) // size
        replicas = [
            self.rollout_replica_class(self.start_rank + i, rollout, model, gpus_per_node=per_node)
            for i in range(count)
        ]
        for replica in replicas:
            replica.replicas_on_node = min(count, max(1, per_node // size))
            replica.device_name = str(self.config.trainer.device)
        try:
            await asyncio.gather(*self._starts(replicas))
        except BaseException:
            await asyncio.gather(*(replica.shutdown() for replica in replicas), return_exceptions=True)
            raise
        self.rollout_replicas = replicas

    def _devices(self, per_node: int, size: int) -> int:
        """Devices to serve on; `ConfigError` when replicas of `size` do not fit them."""
        if self.worker_group is not None:
            devices = len(self.worker_group.workers)
        elif self.rollout_resource_pool is not None:
            devices = self.rollout_resource_pool.world_size
        else:
            devices = int(self.config.actor_rollout_ref.rollout.get("nnodes", None) or 0) * per_node
        if devices >= size and devices % size == 0:
            return devices
        hint = (
            ""
            if self.worker_group is not None
            else (
                "; without actor workers rollout.nnodes x rollout.n_gpus_per_node devices serve, and both must be set"
            )
        )
        raise ConfigError(
            f"{devices} devices cannot hold rollout replicas of {size} (tensor x data x pipeline parallel size). "
            f"Choose parallel sizes whose product divides the number of devices{hint}."
        )

    def _starts(self, replicas: list[RolloutReplica]) -> list[Any]:
        if self.worker_group is not None:
            return [replica.init_hybrid(self.worker_group) for replica in replicas]
        if self.rollout_resource_pool is None:
            return [replica.init_standalone() for replica in replicas]
        from rlflow.single_controller.ray import split_resource_pool

        pools = split_resource_pool(self.rollout_resource_pool, replicas[0].world_size)
        return [replica.init_standalone(pool) for replica, pool in zip(replicas, pools, strict=True)]

    def _launch_balancer(self) -> None:
        import ray

        servers = {replica.server_id: replica.server_handle for replica in self.rollout_replicas}
        deterministic = bool(self.config.actor_rollout_ref.rollout.get("full_determinism", False))
        self.global_load_balancer = (
            ray.remote(GlobalRequestLoadBalancer)
            .options(num_cpus=0, max_concurrency=_BALANCER_CONCURRENCY)
            .remote(servers, full_determinism=deterministic)
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

    def handles_by_worker(self, only: Collection[int] | None = None) -> list[Any]:
        """Server handle for each worker rank: the argument of `bind_rollout`.

        None for ranks that lead no replica, whose replica has no server now, or is not among the ranks `only`.
        """
        handles: list[Any] = []
        for replica in self.rollout_replicas:
            wanted = replica.servers and (only is None or replica.replica_rank in only)
            handles.extend([replica.server_handle if wanted else None, *([None] * (replica.world_size - 1))])
        return handles

    @auto_await
    async def shutdown(self) -> None:
        """End the servers and the balancer."""
        import ray

        await asyncio.gather(*(replica.shutdown() for replica in self.rollout_replicas))
        if self.global_load_balancer is not None:
            ray.kill(self.global_load_balancer)
            self.global_load_balancer = None
