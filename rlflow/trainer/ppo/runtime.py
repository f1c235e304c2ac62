"""Build the processes of a run: worker groups, reward workers, rollout servers.

Order: pools -> colocated worker groups -> models -> reward workers -> servers -> weight-sync manager. Each wait has a
deadline and names what it waited for. Policy, reference and critic live in the same processes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from omegaconf import open_dict

from rlflow.checkpoint_engine.manager import CheckpointEngineManager
from rlflow.config import HFModelConfig, omega_conf_to_dataclass
from rlflow.config.parallel_checks import split_over
from rlflow.reward_loop import RewardLoopManager
from rlflow.single_controller.ray import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    ResourcePoolManager,
    create_colocated_worker_cls,
)
from rlflow.trainer.ppo.off_policy import carry_bypass_settings
from rlflow.trainer.ppo.utils import Role, need_critic, need_reference_policy
from rlflow.transfer_queue.settings import NAMESPACE_ENV
from rlflow.utils.device import COLLECTIVE_TIMEOUT_ENV
from rlflow.utils.flops_counter import linear_work_per_token
from rlflow.utils.seqlen_balancing import LINEAR_WORK_PER_TOKEN
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
    linear_work: int = LINEAR_WORK_PER_TOKEN

    @property
    def eos_token_id(self) -> int:
        """Token id that fills padding rows."""
        eos = self.tokenizer.eos_token_id
        return int(eos if eos is not None else 0)


def build_runtime(config: Any, total_training_steps: int) -> Runtime:
    """Start all processes of the run and load the models.

    `total_training_steps` becomes the horizon of the LR schedules.
    """
    trainer = config.trainer
    with open_dict(config):
        config.actor_rollout_ref.actor.optim.total_training_steps = total_training_steps
        if need_critic(config):
            config.critic.optim.total_training_steps = total_training_steps
    carry_bypass_settings(config)
    needs_ref = need_reference_policy(config)
    role = Role.ActorRolloutRef if needs_ref and not _ref_in_actor(config) else Role.ActorRollout
    roles = [role, Role.Critic] if need_critic(config) else [role]
    pools = ResourcePoolManager(
        resource_pool_spec={"global_pool": [trainer.n_gpus_per_node] * trainer.nnodes},
        mapping=dict.fromkeys(roles, "global_pool"),
        device_name=trainer.device,
    )
    pools.create_resource_pool()
    groups = _worker_groups(config, roles, pools.get_resource_pool(role))
    actor_wg, critic_wg = groups[role], groups.get(Role.Critic)
    if critic_wg is not None:
        critic_wg.init_model()
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
        dp_size=split_over(config, needs_ref, critic_wg is not None),
        critic_wg=critic_wg,
        linear_work=_linear_work(config),
    )


def _ref_in_actor(config: Any) -> bool:
    """Whether the policy without its adapter is the reference, so that no second model is loaded."""
    return omega_conf_to_dataclass(config.actor_rollout_ref.model, HFModelConfig).uses_lora


def _linear_work(config: Any) -> int:
    """Work of a token of the policy, for balancing rows over ranks as its engine balances them over micro-batches."""
    from rlflow.workers.engine.fsdp.model import load_hf_config

    return linear_work_per_token(load_hf_config(omega_conf_to_dataclass(config.actor_rollout_ref.model, HFModelConfig)))


def _worker_groups(config: Any, roles: list[Role], pool: Any) -> dict[Role, Any]:
    """One view per role of the processes that host all of them."""
    workers = {str(role): _worker(config, role) for role in roles}
    group = RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=create_colocated_worker_cls(workers),
        device_name=config.trainer.device,
        call_timeout_s=float(config.trainer.call_timeout_s),
        worker_env={COLLECTIVE_TIMEOUT_ENV: str(config.actor_rollout_ref.nccl_timeout), **_table_env(config)},
    )
    views = group.spawn(set(workers))
    return {role: views[str(role)] for role in roles}


def _table_env(config: Any) -> dict[str, str]:
    """Tells the workers which table is this run's, when the configuration names one (runs that share a cluster)."""
    namespace = config.transfer_queue.get("namespace")
    return {NAMESPACE_ENV: str(namespace)} if namespace else {}


def _worker(config: Any, role: Role) -> RayClassWithInitArgs:
    if role is Role.Critic:
        from rlflow.workers.critic_worker import CriticWorker

        response_length = config.actor_rollout_ref.rollout.response_length
        return RayClassWithInitArgs(cls=CriticWorker, config=config.critic, response_length=response_length)
    from rlflow.workers.engine_workers import ActorRolloutRefWorker

    return RayClassWithInitArgs(cls=ActorRolloutRefWorker, config=config.actor_rollout_ref, role=str(role))
