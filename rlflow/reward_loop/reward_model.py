"""The servers of a reward model, seen from the controller.

    own pool      serve all the time
    colocated     asleep but for the moments in which the trainer scores a batch

Generative reward models have their place here: replicas of a generating engine behind the same manager, whose client
asks for text (`/v1/chat/completions` of the router). This version refuses them where the model is named.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import Any

from rlflow.config import HFModelConfig
from rlflow.reward_loop.reward_model_client import RETRY_PAUSE_S, RewardModelClient
from rlflow.single_controller.ray import split_resource_pool
from rlflow.utils.errors import ConfigError
from rlflow.utils.ray_utils import auto_await
from rlflow.workers.rollout.base import RolloutError
from rlflow.workers.rollout.replica import RolloutReplica, get_rollout_replica_class

logger = logging.getLogger(__name__)


class RewardModelManager:
    """Replicas of one reward model.

    Args:
        config: the whole resolved config; reads `reward.reward_model` and `actor_rollout_ref.rollout.full_determinism`.
        resource_pool: a replica is placed on each part of it that is as large as one; None: wherever Ray has room.
    """

    def __init__(self, config: Any, resource_pool: Any = None) -> None:
        self.config = config.reward.reward_model
        self.rollout_replicas: list[RolloutReplica] = []
        self._pool = resource_pool
        self._deterministic = bool(config.actor_rollout_ref.rollout.get("full_determinism", False))

    @auto_await
    async def launch(self) -> None:
        """Start the servers.

        Raises:
            ConfigError: the model cannot score, or its tokenizer has no chat template.
        """
        from ray.exceptions import RayTaskError

        rollout = self.config.rollout.copy()
        if self._deterministic:
            rollout.max_num_seqs = 1  # the last bits of a score depend on the rows beside it
        replica_class = get_rollout_replica_class(str(rollout.name))
        size = replica_class.world_size_for(rollout)
        pools = [None] if self._pool is None else split_resource_pool(self._pool, size)
        model = HFModelConfig(path=str(self.config.model_path))
        per_node = int(self.config.n_gpus_per_node)
        replicas = [replica_class(i, rollout, model, per_node, is_reward_model=True) for i in range(len(pools))]
        own = bool(self.config.enable_resource_pool)
        for replica in replicas:
            replica.replicas_on_node = len(replicas)
        starts = [
            replica.init_standalone(pool) if own else replica.init_colocated(pool)
            for replica, pool in zip(replicas, pools, strict=True)
        ]
        try:
            await asyncio.gather(*starts)
        except BaseException as error:
            await asyncio.gather(*(replica.shutdown() for replica in replicas), return_exceptions=True)
            if isinstance(error, RayTaskError) and isinstance(error.cause, ConfigError):
                raise error.cause from None
            raise
        self.rollout_replicas = replicas
        logger.info("%d replicas of the reward model %s", len(replicas), self.config.model_path)

    def get_client(self) -> RewardModelClient:
        """A client of these servers; it may be sent to other processes."""
        servers = [replica.server_handle for replica in self.rollout_replicas]
        return RewardModelClient(servers, float(self.config.rollout.request_timeout_s))

    @auto_await
    async def wake_up(self) -> None:
        """Take the devices and score.

        Raises:
            RolloutError: a server is dead, or away for longer than `request_timeout_s`.
        """
        await self._all("wake_up")

    @auto_await
    async def sleep(self) -> None:
        """Give the devices back; requests that come now wait. Raises as `wake_up`."""
        await self._all("sleep")

    @auto_await
    async def shutdown(self) -> None:
        """End the servers."""
        replicas, self.rollout_replicas = self.rollout_replicas, []
        await asyncio.gather(*(replica.shutdown() for replica in replicas))

    async def _all(self, method: str) -> None:
        await asyncio.gather(*(self._patiently(replica, method) for replica in self.rollout_replicas))

    async def _patiently(self, replica: RolloutReplica, method: str) -> None:
        """A call that waits for a server that Ray is starting again."""
        from ray.exceptions import ActorUnavailableError

        deadline = monotonic() + float(self.config.rollout.request_timeout_s)
        while True:
            try:
                await getattr(replica, method)()
                return
            except RolloutError as error:
                if not isinstance(error.__cause__, ActorUnavailableError) or monotonic() > deadline:
                    raise
                await asyncio.sleep(RETRY_PAUSE_S)
