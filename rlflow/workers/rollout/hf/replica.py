"""Replica of the embedded engine: one server process beside the worker whose weights it serves."""

from __future__ import annotations

import logging
import os
from typing import Any

from rlflow.utils.device import DEVICE_ENV, thread_environment
from rlflow.utils.ray_utils import ray_await
from rlflow.workers.rollout.replica import LAUNCH_TIMEOUT_S, RolloutReplica

logger = logging.getLogger(__name__)


NOSET_ENV = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
# A reward model's weights never change: its server may be started again.
SCORING_RESTARTS = 3


class HFReplica(RolloutReplica):
    """Always one device: the engine does not split a model (`tensor_model_parallel_size` is not used).

    The replica of a reward model runs an `HFScoringServer`, another one an `HFServer`.
    """

    supports_parallelism = False

    async def launch_servers(self) -> None:
        import ray

        node = await self._node()
        threads = max(1, node["cores"] // self.replicas_on_node)
        actor: Any = ray.remote(self._server_class())
        server = actor.options(
            num_cpus=0,
            max_concurrency=self.max_concurrency,
            scheduling_strategy=self._placement(node),
            runtime_env={"env_vars": self._environment(threads, node["env"])},
            **self._more_options(),
        ).remote(*self._server_arguments())
        self.servers, self._server_handle = [server], server
        facts = await ray_await(
            server.ready.remote(), what=f"{self.kind} replica {self.replica_rank} to start", timeout_s=LAUNCH_TIMEOUT_S
        )
        logger.info("%s replica %d: %s", self.kind, self.replica_rank, facts)
        self.pids = [facts["pid"]]

    def _server_class(self) -> type:
        if self.is_reward_model:
            from rlflow.workers.rollout.hf.scoring_server import HFScoringServer

            return HFScoringServer
        from rlflow.workers.rollout.hf.server import HFServer

        return HFServer

    def _server_arguments(self) -> tuple[Any, ...]:
        return self.config, self.model_config, self.replica_rank, self.replicas_on_node

    def _more_options(self) -> dict[str, Any]:
        """Restarts, and the share of a device that Ray then makes visible."""
        options: dict[str, Any] = {"max_restarts": SCORING_RESTARTS if self.is_reward_model else 0}
        if self.resource_pool is not None and self.resource_pool.use_gpu and not self.workers:
            options["num_gpus"] = 1 / self.resource_pool.max_colocate_count
        return options

    def _environment(self, threads: int, device_env: dict[str, str]) -> dict[str, str]:
        env = server_environment(threads, device_env)
        if "num_gpus" in self._more_options():
            del env[NOSET_ENV]  # Ray shows the process its device of the pool
        return env

    async def _node(self) -> dict[str, Any]:
        """Facts of the node to serve on: that of the worker, of the pool's bundle, or any."""
        if self.workers:
            return (await self.ask_workers(node_facts))[0]
        facts = node_facts()
        if self.resource_pool is not None:  # Ray chooses among the pool's devices
            facts["env"] = {DEVICE_ENV: self.resource_pool.device_name}
        return {**facts, "node_id": None}

    def _placement(self, node: dict[str, Any]) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        if node["node_id"] is not None:
            return NodeAffinitySchedulingStrategy(node_id=node["node_id"], soft=False)
        if self.resource_pool is not None:
            bundle = self.resource_pool.bundles()[0]
            return PlacementGroupSchedulingStrategy(
                placement_group=bundle.group, placement_group_bundle_index=bundle.index
            )
        return "SPREAD"


def node_facts(_worker: Any = None) -> dict[str, Any]:
    """Called in a worker: its Ray node, the cores it may use (number and ids), what chooses its device."""
    import ray

    from rlflow.utils.device import cpu_cores, get_device_name, get_visible_devices_keyword

    env = {DEVICE_ENV: get_device_name()}
    if (visible := get_visible_devices_keyword()) and visible in os.environ:
        env[visible] = os.environ[visible]
    cores = cpu_cores()
    ids = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(cores))
    node_id = ray.get_runtime_context().get_node_id()
    return {"node_id": node_id, "cores": cores, "core_ids": ids[:cores], "env": env}


def server_environment(threads: int, device_env: dict[str, str]) -> dict[str, str]:
    """Environment of a server process with that many compute threads."""
    return {
        **thread_environment(threads),
        "TOKENIZERS_PARALLELISM": "false",
        NOSET_ENV: "1",
        **device_env,
    }
