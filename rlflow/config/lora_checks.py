"""Checks of LoRA: whether adapters can be built, start and reach the rollout as the configuration says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.config import problems as problem
from rlflow.config.model import HFModelConfig
from rlflow.config.worker import CheckpointConfig, OptimizerConfig

if TYPE_CHECKING:
    from rlflow.config.checks import TypedConfig

# Rollout engines that serve an adapter beside its frozen weights.
_SERVES_ADAPTERS: tuple[str, ...] = ()
# Below this rate an adapter, which starts at zero, hardly moves in a run of usual length.
_LOW_LR = 1e-5


def check_lora(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    """Everything about adapters of the policy and of the critic."""
    parts = [("actor_rollout_ref.model", c.model, "actor_rollout_ref.actor", c.actor.optim, c.actor.checkpoint)]
    if c.needs_critic:
        parts.append(("critic.model", c.critic.model, "critic", c.critic.optim, c.critic.checkpoint))
    for node, model, trained, optim, checkpoint in parts:
        if model.uses_lora:
            _check_adapter(node, model, problems)
            _check_rate(trained, optim, notices)
        else:
            _check_unused(node, model, trained, checkpoint, notices)
    if c.model.uses_lora and not c.model.lora.merge and c.rollout.name not in _SERVES_ADAPTERS:
        notices.append(
            f"rollout.name={c.rollout.name} cannot serve an adapter beside its weights: it is sent merged ones, as "
            "with actor_rollout_ref.model.lora.merge=true"
        )


def _check_adapter(node: str, model: HFModelConfig, problems: list[str]) -> None:
    problems.extend(problem.missing_package(f"{node}.lora_rank={model.lora_rank}", "peft", "lora"))
    if model.lora_alpha <= 0:
        problems.append(
            f"{node}.lora_alpha={model.lora_alpha}: an adapter counts lora_alpha / lora_rank times, so this one would "
            f"never say anything.\n    try:    {node}.lora_alpha={max(16, 2 * model.lora_rank)}"
        )
    path = model.lora_adapter_path
    if path and not (Path(path).expanduser() / "adapter_config.json").is_file():
        problems.append(
            f"{node}.lora_adapter_path={path}: no adapter_config.json there, so it is no PEFT adapter.\n"
            "    try:    the folder lora_adapter of a checkpoint, or null to start a new one"
        )


def _check_rate(trained: str, optim: OptimizerConfig, notices: list[str]) -> None:
    if 0 < optim.lr < _LOW_LR:
        notices.append(
            f"{trained}.optim.lr={optim.lr:g} is a rate for whole weights; an adapter starts at zero and usually wants "
            "1e-5 to 1e-4"
        )


def _check_unused(
    node: str, model: HFModelConfig, trained: str, checkpoint: CheckpointConfig, notices: list[str]
) -> None:
    set_keys = [f"{trained}.checkpoint.save_lora_only"] if checkpoint.save_lora_only else []
    set_keys += [f"{node}.lora.merge"] if model.lora.merge else []
    if set_keys:
        notices.append(f"{', '.join(set_keys)}: there is no adapter ({node}.lora_rank=0), so it changes nothing")
