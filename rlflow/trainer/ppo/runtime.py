"""Build the processes of a run: worker groups, reward workers, rollout servers.

Order: pools -> colocated worker groups -> models -> reward workers -> servers -> weight-sync manager and supervisor.
Each wait has a deadline and names what it waited for. The roles of one pool live in the same processes: policy,
reference and critic in "global_pool", unless the pools map one of them elsewhere (`resource_pools`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from omegaconf import open_dict

from rlflow.checkpoint_engine.manager import CheckpointEngineManager, build_manager
from rlflow.config import HFModelConfig, SupervisorConfig, omega_conf_to_dataclass
from rlflow.config.parallel_checks import split_over
from rlflow.config.pools import GLOBAL_POOL, REF_POOL, REWARD_POOL, has_reference_model, pool_sizes
from rlflow.reward_loop import RewardLoopManager
from rlflow.single_controller.ray import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    ResourcePoolManager,
    create_colocated_worker_cls,
)
from rlflow.trainer.ppo.off_policy import carry_bypass_settings
from rlflow.trainer.ppo.utils import Role, need_critic, need_reference_policy, need_reward_model
from rlflow.transfer_queue.settings import NAMESPACE_ENV
from rlflow.utils.device import COLLECTIVE_TIMEOUT_ENV
from rlflow.utils.flops_counter import linear_work_per_token
from rlflow.utils.seqlen_balancing import LINEAR_WORK_PER_TOKEN
from rlflow.utils.tokenizer import policy_tokenizer
from rlflow.workers.rollout.llm_server import LLMServerManager
from rlflow.workers.rollout.supervised_sync import SupervisedSync
from rlflow.workers.rollout.supervisor import ReplicaSupervisor

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
    ref_dp_size: int = 1
    critic_wg: Any = None
    supervisor: ReplicaSupervisor | None = None
    linear_work: int = LINEAR_WORK_PER_TOKEN

    @property
    def eos_token_id(self) -> int:
        """Token id that fills padding rows."""
        eos = self.tokenizer.eos_token_id
        return int(eos if eos is not None else 0)


def resource_pools(config: Any) -> ResourcePoolManager:
    """Which role lives on which devices.

    "global_pool", the devices of `trainer`, has the policy and the critic. The reference is part of the policy's worker
    (`Role.ActorRolloutRef`), or with `ref.enable_resource_pool` a worker of its own (`Role.RefPolicy`) in "ref_pool".
    A policy that trains an adapter is its own reference. The reward model shares "global_pool", or has "reward_pool"
    (`reward_model.enable_resource_pool`).
    """
    spec = pool_sizes(config)
    mapping: dict[Role, str] = {Role.ActorRollout: GLOBAL_POOL}
    if REF_POOL in spec:
        mapping[Role.RefPolicy] = REF_POOL
    elif has_reference_model(config):
        mapping = {Role.ActorRolloutRef: GLOBAL_POOL}
    if need_critic(config):
        mapping[Role.Critic] = GLOBAL_POOL
    if need_reward_model(config):
        mapping[Role.RewardModel] = REWARD_POOL if REWARD_POOL in spec else GLOBAL_POOL
    return ResourcePoolManager(resource_pool_spec=spec, mapping=mapping, device_name=config.trainer.device)


def build_runtime(config: Any, total_training_steps: int, pools: ResourcePoolManager) -> Runtime:
    """Start all processes of the run and load the models.

    `total_training_steps` becomes the horizon of the LR schedules; `pools` says which roles there are, and where.
    """
    with open_dict(config):
        config.actor_rollout_ref.actor.optim.total_training_steps = total_training_steps
        if need_critic(config):
            config.critic.optim.total_training_steps = total_training_steps
    carry_bypass_settings(config)
    pools.create_resource_pool()
    groups = _worker_groups(config, pools)
    actor_wg = groups[Role.ActorRolloutRef if Role.ActorRolloutRef in groups else Role.ActorRollout]
    ref_wg, critic_wg = groups.get(Role.RefPolicy), groups.get(Role.Critic)
    for group in (critic_wg, actor_wg, ref_wg):
        if group is not None:
            group.init_model()
    if ref_wg is None and need_reference_policy(config):
        ref_wg = actor_wg
    scores = Role.RewardModel in pools.mapping
    reward_manager = RewardLoopManager(config, pools.get_resource_pool(Role.RewardModel) if scores else None)
    server_manager = LLMServerManager.create(config, worker_group=actor_wg)
    actor_wg.bind_rollout(server_manager.handles_by_worker())
    checkpoint_manager, supervisor = _weight_sync(config, actor_wg, server_manager)
    return Runtime(
        tokenizer=policy_tokenizer(config),
        actor_wg=actor_wg,
        ref_policy_wg=ref_wg,
        reward_manager=reward_manager,
        server_manager=server_manager,
        checkpoint_manager=checkpoint_manager,
        pools=pools,
        n_devices=pools.get_n_gpus(),
        dp_size=split_over(config, Role.ActorRolloutRef in groups, critic_wg is not None),
        ref_dp_size=1 if ref_wg is None else ref_wg.topology("ref").dp_size,
        critic_wg=critic_wg,
        supervisor=supervisor,
        linear_work=_linear_work(config),
    )


def _weight_sync(
    config: Any, actor_wg: Any, server_manager: LLMServerManager
) -> tuple[CheckpointEngineManager | SupervisedSync, ReplicaSupervisor | None]:
    """Who brings weights to the replicas, and who watches them (nobody: `rollout.supervisor.enable=false`)."""
    rollout = config.actor_rollout_ref.rollout
    replicas = server_manager.get_replicas()
    manager = build_manager(rollout, actor_wg, replicas, backend="naive")
    settings = omega_conf_to_dataclass(rollout.supervisor, SupervisorConfig)
    if not settings.enable:
        return manager, None
    supervisor = ReplicaSupervisor(settings, replicas, server_manager.global_load_balancer)
    sync = SupervisedSync(manager, actor_wg, server_manager, supervisor)
    supervisor.start()
    return sync, supervisor


def _linear_work(config: Any) -> int:
    """Work of a token of the policy, for balancing rows over ranks as its engine balances them over micro-batches."""
    from rlflow.workers.engine.fsdp.model import load_hf_config

    return linear_work_per_token(load_hf_config(omega_conf_to_dataclass(config.actor_rollout_ref.model, HFModelConfig)))


def _worker_groups(config: Any, pools: ResourcePoolManager) -> dict[Role, Any]:
    """One view per role of the processes that host it; those of one pool host all its roles."""
    hosted: dict[str, list[Role]] = {}
    for role, pool in pools.mapping.items():
        if role is not Role.RewardModel:  # served by replicas, not by a worker group
            hosted.setdefault(pool, []).append(role)
    views: dict[Role, Any] = {}
    for roles in hosted.values():
        workers = {str(role): _worker(config, role) for role in roles}
        group = RayWorkerGroup(
            resource_pool=pools.get_resource_pool(roles[0]),
            ray_cls_with_init=create_colocated_worker_cls(workers),
            device_name=config.trainer.device,
            call_timeout_s=float(config.trainer.call_timeout_s),
            worker_env={COLLECTIVE_TIMEOUT_ENV: str(config.actor_rollout_ref.nccl_timeout), **_table_env(config)},
        )
        spawned = group.spawn(set(workers))
        views |= {role: spawned[str(role)] for role in roles}
    return views


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
