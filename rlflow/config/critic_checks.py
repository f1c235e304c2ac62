"""Checks of the critic: whether there is one where it is needed, its values, its model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.config import problems as problem
from rlflow.config.model import HFModelConfig

if TYPE_CHECKING:
    from rlflow.config.checks import TypedConfig


def check_critic(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    """Everything about the critic but its batch sizes."""
    _check_presence(c, problems, notices)
    if c.needs_critic:
        _check_values(c, problems)
        _check_model(c, problems, notices)


def _check_presence(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    estimator, warmup = c.algorithm.adv_estimator, c.trainer.critic_warmup
    if estimator == "gae" and not c.needs_critic:
        problems.append(
            "algorithm.adv_estimator=gae needs a critic, and critic.enable=false leaves it out.\n"
            "    try:    critic.enable=null, or algorithm.adv_estimator=grpo"
        )
    if estimator == "grpo" and c.needs_critic:
        notices.append("critic.enable=true with grpo: a critic is trained, but no advantage uses its values")
    if warmup > 0 and not c.needs_critic:
        problems.append(
            f"trainer.critic_warmup={warmup}: there is no critic, so the steps before it would train nothing.\n"
            "    try:    trainer.critic_warmup=0"
        )
    steps = c.trainer.total_training_steps
    if c.needs_critic and steps is not None and warmup > steps:
        notices.append(f"trainer.critic_warmup={warmup} is behind the last step ({steps}): the policy is never updated")


def _check_values(c: TypedConfig, problems: list[str]) -> None:
    critic = c.critic
    at_least = [
        ("critic.ppo_epochs", critic.ppo_epochs, 1),
        ("critic.optim.lr", critic.optim.lr, 0),
        ("critic.cliprange_value", critic.cliprange_value, 1e-9),
    ]
    for key, value, low in at_least:
        problems.extend(problem.below(key, value, low))
    problems.extend(
        problem.outside("critic.loss_scale_factor", critic.loss_scale_factor, 1e-9, math.inf, c.rollout.response_length)
    )
    if critic.strategy not in ("fsdp", "fsdp2"):
        problems.append(problem.choice("critic.strategy", critic.strategy, ("fsdp", "fsdp2")))
    if critic.fsdp.dtype not in ("bfloat16", "float32", "bf16", "fp32"):
        problems.append(problem.choice("critic.fsdp.dtype", critic.fsdp.dtype, ("bfloat16", "float32")))
    if critic.fsdp.forward_only:
        problems.append(
            "critic.fsdp.forward_only=true: a critic that is never trained predicts nothing.\n"
            "    try:    critic.fsdp.forward_only=false"
        )
    problems.extend(problem.optimizer("critic", critic.optim))


def _check_model(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    path, policy = c.critic.model.path, c.model.path
    if problem.is_missing_folder(path):
        if path == HFModelConfig().path:
            problems.append(
                f"critic.model.path is not set, and its default {path} is not there: the advantage estimator "
                f"{c.algorithm.adv_estimator} needs a critic.\n    try:    critic.model.path={policy} (a value head is "
                "added to it)"
            )
        else:
            problems.append(
                f"critic.model.path={path}: no config.json there, so it is not a Hugging Face model folder.\n"
                f"    try:    critic.model.path={policy} (a value head is added to it)"
            )
    mine, theirs = _vocab_size(path), _vocab_size(policy)
    if mine is not None and theirs is not None and mine < theirs:
        problems.append(
            f"critic.model.path={path} knows {mine} tokens, the policy at {policy} knows {theirs}: a critic reads the "
            f"policy's token ids.\n    try:    critic.model.path={policy}"
        )
    if c.critic.model.custom_chat_template is not None:
        notices.append("critic.model.custom_chat_template is not read: a critic sees the token ids of the policy")


def _vocab_size(model: str) -> int | None:
    """Rows of the embedding of a model in a local folder; None when that is not known without loading it."""
    try:
        config = json.loads((Path(model).expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return None
    size = config.get("vocab_size") if isinstance(config, dict) else None
    return size if isinstance(size, int) else None
