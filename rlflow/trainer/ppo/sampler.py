"""The replay buffer that a configuration asks for: the built-in one, with or without a group filter, or the user's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlflow.trainer.ppo.group_filter import GroupFilter, max_prompts
from rlflow.trainer.ppo.issued_prompts import LostGroups
from rlflow.trainer.ppo.replay_buffer import ReplayBuffer
from rlflow.utils.import_utils import load_extern_object

if TYPE_CHECKING:
    from rlflow.trainer.ppo.trainer_base import PPOTrainer


def build_replay_buffer(trainer: PPOTrainer) -> Any:
    """Built once the data is known: the filter's bound is a number of prompts."""
    config = trainer.config
    sampler, mode = config.trainer.v1.sampler, config.trainer.v1.trainer_mode
    filtered = config.algorithm.filter_groups.enable
    kwargs = {
        "trainer_mode": mode,
        "trainer_config": config.trainer.v1.get(mode),
        "max_off_policy_threshold": sampler.max_off_policy_threshold,
        "max_off_policy_strategy": sampler.max_off_policy_strategy,
        "sampler_kwargs": dict(sampler.sampler_kwargs),
        "refill_fn": trainer.refill if filtered else None,
    }
    if sampler.custom_sampler.path and sampler.custom_sampler.name:
        return load_extern_object(sampler.custom_sampler.path, sampler.custom_sampler.name)(**kwargs)
    return ReplayBuffer(
        **kwargs,
        stall_timeout_s=config.trainer.stall_timeout_s,
        describe_stall=trainer.describe_running,
        on_progress=lambda done, total: trainer.on_progress(done, total) if trainer.on_progress else None,
        on_ended=trainer.prompt_ended,
        group_filter=_group_filter(trainer) if filtered else None,
        lost_groups=LostGroups(trainer.reissue),
    )


def _group_filter(trainer: PPOTrainer) -> GroupFilter:
    config, options = trainer.config, trainer.config.algorithm.filter_groups
    batch_size = config.data.train_batch_size
    return GroupFilter(
        options.metric,
        max_prompts=max_prompts(options.max_num_gen_batches, batch_size, trainer.feed.prompts_per_epoch),
        per_dropped=options.max_inflight_gen_batches,
        in_waves=config.actor_rollout_ref.rollout.full_determinism,
        refill=trainer.refill,
        on_dropped=trainer.prompts.dropped,
    )
