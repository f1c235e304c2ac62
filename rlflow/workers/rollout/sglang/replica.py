"""Replica of the SGLang engine: one server actor that starts SGLang's processes beside the workers it serves."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

from rlflow.utils.device import get_visible_devices_keyword
from rlflow.utils.errors import ConfigError
from rlflow.utils.ray_utils import ray_await
from rlflow.workers.rollout.hf.replica import HFReplica, node_facts
from rlflow.workers.rollout.replica import LAUNCH_TIMEOUT_S, RolloutMode


class SGLangReplica(HFReplica):
    """All devices of a replica are on one node; its server reserves none of its own."""

    supports_parallelism = True

    async def launch_servers(self) -> None:
        if importlib.util.find_spec("sglang") is None:
            raise ConfigError(
                "rollout.name=sglang needs SGLang: pip install 'rlflow[sglang]' on a GPU; on a CPU "
                "scripts/setup_sglang.sh makes an environment with it. Or set rollout.name=hf (the embedded engine)."
            )
        if self.is_reward_model:
            raise ConfigError(
                "reward.reward_model.rollout.name=sglang: reward models are served by the hf engine only. Set it to hf."
            )
        if self.nnodes > 1:
            raise ConfigError(
                f"rollout.name=sglang: a replica of {self.world_size} devices does not fit a node of "
                f"{self.gpus_per_replica_node}. Lower rollout.tensor_model_parallel_size or data_parallel_size."
            )
        await super().launch_servers()

    def _server_class(self) -> type:
        from rlflow.workers.rollout.sglang.server import SGLangServer

        return SGLangServer

    def _server_arguments(self) -> tuple[Any, ...]:
        own_devices = self.rollout_mode is RolloutMode.STANDALONE
        return (self.config, self.model_config, self.replica_rank, self.replicas_on_node, own_devices)

    async def _node(self) -> dict[str, Any]:
        """As of the first worker, with the devices of all of them."""
        facts = await super()._node()
        keyword = get_visible_devices_keyword()
        if len(self.workers) > 1 and keyword in facts["env"]:
            calls = [worker.__ray_call__.remote(node_facts) for worker in self.workers]
            others = await asyncio.gather(
                *(ray_await(call, what="a worker's node", timeout_s=LAUNCH_TIMEOUT_S) for call in calls)
            )
            facts["env"][keyword] = ",".join(other["env"][keyword] for other in others)
        return facts
