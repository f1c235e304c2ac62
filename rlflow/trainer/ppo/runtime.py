"""Build the processes of a run: worker groups, reward workers, rollout servers.

Order: pools -> colocated worker group -> models -> reward workers -> servers -> weight-sync manager. Each wait has a
deadline and names what it waited for.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from omegaconf import open_dict

from rlflow.checkpoint_engine.manager import CheckpointEngineManager
from rlflow.reward_loop import RewardLoopManager
from rlflow.single_controller.ray import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    ResourcePoolManager,
    create_colocated_worker_cls,
)
from rlflow.trainer.ppo.utils import Role, need_reference_policy
from rlflow.utils.tokenizer import policy_tokenizer
from rlflow.workers.rollout.llm_server import LLMServerManager

logger = logging.getLogger(__name__)


@dataclass
class Runtime:
    """Handles of everything that runs; the trainer only talks to these."""

    tokenizer: Any
    actor_wg: Any
    ref_policy_wg: Any
    reward_manager: Any
    server_manager: Any
    checkpoint_manager: Any
    pools: ResourcePoolManager
    n_devices: int
    dp_size: int
    critic_wg: Any = None

    @property
    def eos_token_id(self) -> int:
        """Token id that fills padding rows."""
        eos = self.tokenizer.eos_token_id
        return int(eos if eos is not None else 0)


def build_runtime(config: Any, total_training_steps: int) -> Runtime:
    """Start all processes of the run and load the models.

    `total_training_steps` becomes the horizon of the LR schedule.
    """
    trainer = config.trainer
    with open_dict(config):
        config.actor_rollout_ref.actor.optim.total_training_steps = total_training_steps
    needs_ref = need_reference_policy(config)
    role = Role.ActorRolloutRef if needs_ref else Role.ActorRollout
    pools = ResourcePoolManager(
        resource_pool_spec={"global_pool": [trainer.n_gpus_per_node] * trainer.nnodes},
        mapping={role: "global_pool"},
        device_name=trainer.device,
    )
    pools.create_resource_pool()
    actor_wg = _worker_group(config, role, pools.get_resource_pool(role))
    actor_wg.init_model()
    reward_manager = RewardLoopManager(config)
    server_manager = LLMServerManager.create(config, worker_group=actor_wg)
    actor_wg.bind_rollout(server_manager.handles_by_worker())
    checkpoint_manager = CheckpointEngineManager(
        config.actor_rollout_ref.rollout.checkpoint_engine, actor_wg, server_manager.get_replicas()
    )
    n_devices = trainer.n_gpus_per_node * trainer.nnodes
    return Runtime(
        tokenizer=policy_tokenizer(config),
        actor_wg=actor_wg,
        ref_policy_wg=actor_wg if needs_ref else None,
        reward_manager=reward_manager,
        server_manager=server_manager,
        checkpoint_manager=checkpoint_manager,
        pools=pools,
        n_devices=n_devices,
        # The FSDP engine is data parallel over every rank.
        dp_size=n_devices,
    )


def _worker_group(config: Any, role: Role, pool: Any) -> Any:
    from rlflow.workers.engine_workers import ActorRolloutRefWorker

    name = str(role)
    worker = RayClassWithInitArgs(cls=ActorRolloutRefWorker, config=config.actor_rollout_ref, role=name)
    colocated = create_colocated_worker_cls({name: worker})
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=colocated, device_name=config.trainer.device)
    return group.spawn({name})[name]
