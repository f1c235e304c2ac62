"""What a run says about itself when it starts: its stages, their fields, and its configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlflow.trainer.ppo.advantage import needed_fields
from rlflow.trainer.ppo.estimator_inputs import optional_fields, wants_sum_pi_squared
from rlflow.trainer.ppo.field_table import StageFields, check_stage_table, stage_table
from rlflow.trainer.ppo.off_policy import corrected_fields, is_bypassed

if TYPE_CHECKING:
    from rlflow.trainer.ppo.trainer_base import PPOTrainer


def declared_stages(trainer: PPOTrainer, fused: bool) -> dict[str, StageFields]:
    """The stages of this run by name, from the declarations of its own worker classes.

    `fused`: those of steps whose update gives the old log-probs.

    Raises:
        ContractError: a stage reads a field that no earlier one writes.
    """
    runtime = trainer.runtime
    groups = {"actor": runtime.actor_wg, "ref": runtime.ref_policy_wg, "critic": runtime.critic_wg}
    return stages_of(
        trainer.config,
        {role: group.worker_cls for role, group in groups.items() if group is not None},
        reward_after=trainer.get_reward_handles() is None,
        kl_in_reward=trainer.kl_controller is not None,
        fused=fused,
    )


def stages_of(
    config: Any, worker_classes: dict[str, type], *, reward_after: bool, kl_in_reward: bool, fused: bool
) -> dict[str, StageFields]:
    """The stages of a configuration by name, in their order; see `stage_table` for the arguments.

    Raises:
        ContractError: a stage reads a field that no earlier one writes.
    """
    stages = stage_table(
        worker_classes,
        with_log_probs=bool(config.actor_rollout_ref.rollout.calculate_log_probs),
        reward_after=reward_after,
        kl_in_reward=kl_in_reward,
        sum_pi_squared=wants_sum_pi_squared(config),
        corrected=corrected_fields(config),
        bypassed=is_bypassed(config),
        fused=fused,
        estimator_needs=needed_fields(config.algorithm.adv_estimator),
        estimator_reads=optional_fields(config),
    )
    check_stage_table(stages)
    written: set[str] = set()
    known: dict[str, StageFields] = {}
    for stage in stages:
        # What no earlier stage of this run writes is not there to be read.
        there = tuple(name for name in stage.optional_reads if name in written)
        known[stage.stage] = replace(stage, optional_reads=there)
        written.update(stage.writes)
    return known


def open_record(trainer: PPOTrainer) -> None:
    """Start the journal at the step the run stands at, and write the plan beside it."""
    import rlflow
    from rlflow.trainer.plan.saved import save_plan_in_background

    trainer.recorder.open(
        trainer.global_steps,
        config_text(trainer.config),
        fresh=not trainer.config.trainer.val_only,
        rlflow=rlflow.__version__,
        total_steps=trainer.feed.total_training_steps,
        world_size=trainer.runtime.n_devices,
        stages=[stage.as_dict() for stage in trainer.stage_fields.values()],
    )
    save_plan_in_background(trainer.config, trainer.recorder.folder)


def config_text(config: Any) -> str:
    """The resolved configuration as YAML, without secrets."""
    from omegaconf import OmegaConf

    from rlflow.utils.redact import redact

    return OmegaConf.to_yaml(OmegaConf.create(redact(OmegaConf.to_container(config, resolve=True))))
