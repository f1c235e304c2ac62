"""The stages of a step, from the configuration alone."""

from __future__ import annotations

from typing import Any

from rlflow.config.checks import need_reference_policy
from rlflow.config.critic import need_critic
from rlflow.trainer.ppo.field_table import StageFields


def plan_stages(config: Any) -> list[StageFields]:
    """The stages in their order, each with the fields that it will find; see `rlflow.trainer.ppo.record`."""
    from rlflow.trainer.ppo.record import stages_of
    from rlflow.workers.engine_workers import ActorRolloutRefWorker

    classes: dict[str, type] = {"actor": ActorRolloutRefWorker}
    if need_reference_policy(config):
        classes["ref"] = ActorRolloutRefWorker
    if need_critic(config):
        from rlflow.workers.critic_worker import CriticWorker

        classes["critic"] = CriticWorker
    model = config.reward.reward_model
    known = stages_of(
        config,
        classes,
        reward_after=bool(model.enable and not model.enable_resource_pool),
        kl_in_reward=bool(config.algorithm.use_kl_in_reward),
        fused=bool(config.actor_rollout_ref.actor.fuse_old_log_prob),
    )
    return list(known.values())
