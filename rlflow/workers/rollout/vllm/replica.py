"""Replica of the vLLM engine: one server actor, and behind it vLLM's own processes on the replica's devices."""

from __future__ import annotations

import importlib.util
from typing import Any

from rlflow.utils.device import get_visible_devices_keyword
from rlflow.utils.errors import ConfigError
from rlflow.workers.rollout.hf.replica import HFReplica, node_facts
from rlflow.workers.rollout.vllm.engine_args import cpu_binding, engine_environment


class VLLMReplica(HFReplica):
    """tensor x pipeline x data parallel devices of one node."""

    supports_parallelism = True

    async def launch_servers(self) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                "rollout.name=vllm needs vLLM: pip install 'rlflow[vllm]' on a GPU; on a CPU scripts/setup_vllm.sh "
                "makes an environment with it. Or set rollout.name=hf (the embedded engine)."
            )
        if self.is_reward_model:
            raise ConfigError(
                "reward.reward_model.rollout.name=vllm: reward models are served by the hf engine only. Set it to hf."
            )
        if self.nnodes > 1:
            raise ConfigError(
                f"rollout.name=vllm: a replica of {self.world_size} devices does not fit a node of "
                f"{self.gpus_per_replica_node}. Lower rollout.tensor_model_parallel_size, pipeline_model_parallel_size "
                "or data_parallel_size."
            )
        await super().launch_servers()

    def _server_class(self) -> type:
        from rlflow.workers.rollout.vllm.server import VLLMServer

        return VLLMServer

    def _server_arguments(self) -> tuple[Any, ...]:
        assert self.rollout_mode is not None
        return (*super()._server_arguments(), self.rollout_mode.value)

    def _more_options(self) -> dict[str, Any]:
        options = super()._more_options()
        if "num_gpus" in options:
            options["num_gpus"] *= self.world_size
        return options

    async def _node(self) -> dict[str, Any]:
        """As of the first worker, with the devices of all of them, and the cores that vLLM's workers are to use."""
        node = await super()._node()
        env, keyword = dict(node["env"]), get_visible_devices_keyword()
        if self.workers and keyword in env:
            env[keyword] = ",".join(facts["env"][keyword] for facts in await self.ask_workers(node_facts))
        place = self.replica_rank % self.replicas_on_node
        binding = cpu_binding(node["core_ids"], ranks=self.world_size, place=place, replicas=self.replicas_on_node)
        return {**node, "env": {**env, **engine_environment(binding)}}
