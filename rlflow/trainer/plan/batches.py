"""How a batch is cut: from prompts to the rows of one forward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rlflow.config.critic import need_critic
from rlflow.config.data_rows import count_rows


@dataclass(frozen=True)
class ModelBatches:
    """How one trained model (actor or critic) goes over a batch.

    Fields:
        dp_ranks: groups of devices that see different rows.
        sp_ranks: devices that share a row.
        rows_a_rank: rows of a step that each of the groups sees.
        mini_batch_rows, mini_batch_rows_a_rank: of one optimizer step.
        micro_batch: rows or tokens of one forward, in words.
        micro_batches: forwards of a rank in an optimizer step; at most, where rows are packed by tokens.
        epochs: passes over the batch.
        optimizer_steps: of a batch.
    """

    dp_ranks: int
    sp_ranks: int
    rows_a_rank: int
    mini_batch_prompts: int
    mini_batch_rows: int
    mini_batch_rows_a_rank: int
    micro_batch: str
    micro_batches: int
    epochs: int
    optimizer_steps: int


@dataclass(frozen=True)
class BatchPlan:
    """Numbers of a step, an epoch and the run; None where the data does not say how many rows it has.

    Fields:
        tokens: of the step's trajectories, were all as long as they may be.
    """

    prompts: int
    sessions: int
    trajectories: int
    longest_tokens: int
    tokens: int
    models: dict[str, ModelBatches]
    data_prompts: int | None
    validation_prompts: int | None
    validation_trajectories: int | None
    steps_an_epoch: int | None
    epochs: int
    steps: int | None
    optimizer_steps: int | None


def plan_batches(config: Any) -> BatchPlan:
    """The table of a checked configuration."""
    data, rollout, trainer = config.data, config.actor_rollout_ref.rollout, config.trainer
    prompts, sessions = int(data.train_batch_size), int(rollout.n)
    longest = int(rollout.prompt_length) + int(rollout.response_length)
    models = {"actor": _model_batches(config, config.actor_rollout_ref.actor, "fsdp_config", longest)}
    if need_critic(config):
        models["critic"] = _model_batches(config, config.critic, "fsdp", longest)
    rows = None if data.custom_cls.path else count_rows(_files(data.train_files), data.train_max_samples)
    validation = None if data.custom_cls.path else count_rows(_files(data.val_files), data.val_max_samples)
    steps_an_epoch = None if rows is None else rows // prompts
    steps = trainer.total_training_steps
    if steps is None and steps_an_epoch is not None:
        steps = steps_an_epoch * trainer.total_epochs
    return BatchPlan(
        prompts=prompts,
        sessions=sessions,
        trajectories=prompts * sessions,
        longest_tokens=longest,
        tokens=prompts * sessions * longest,
        models=models,
        data_prompts=rows,
        validation_prompts=validation,
        validation_trajectories=None if validation is None else validation * int(rollout.val_kwargs.n),
        steps_an_epoch=steps_an_epoch,
        epochs=int(trainer.total_epochs),
        steps=steps,
        optimizer_steps=None if steps is None else steps * models["actor"].optimizer_steps,
    )


def micro_batch_tokens(config: Any, node: Any, slot: str) -> int:
    """Tokens that one device holds in a forward of an update, were all rows as long as they may be.

    Rows of one prompt that are packed share it, unless `share_prompts` is false.
    """
    rollout, engine = config.actor_rollout_ref.rollout, node[slot]
    model = config.critic.model if slot == "fsdp" else config.actor_rollout_ref.model
    prompt, response = int(rollout.prompt_length), int(rollout.response_length)
    sp = max(1, int(engine.ulysses_sequence_parallel_size))
    ranks = max(1, config.trainer.n_gpus_per_node * config.trainer.nnodes // sp)
    rows = max(1, node.ppo_mini_batch_size * rollout.n // ranks)
    shares = bool(model.use_remove_padding) and engine.share_prompts is not False and sp == 1
    if not node.use_dynamic_bsz:
        rows = min(rows, int(node.ppo_micro_batch_size_per_gpu or rows))
    group = min(rows, int(rollout.n)) if shares else 1
    tokens = rows * response + math.ceil(rows / group) * prompt
    if node.use_dynamic_bsz:
        tokens = min(tokens, max(int(node.ppo_max_token_len_per_gpu) * sp, prompt + response))
    return math.ceil(tokens / sp)


def _model_batches(config: Any, node: Any, slot: str, longest: int) -> ModelBatches:
    rollout, sp = config.actor_rollout_ref.rollout, max(1, int(node[slot].ulysses_sequence_parallel_size))
    devices = int(config.trainer.n_gpus_per_node) * int(config.trainer.nnodes)
    dp = max(1, devices // sp)
    prompts, mini, epochs = int(config.data.train_batch_size), int(node.ppo_mini_batch_size), int(node.ppo_epochs)
    rows = math.ceil(mini * rollout.n / dp)
    if node.use_dynamic_bsz:
        budget = int(node.ppo_max_token_len_per_gpu)
        shared = f" x {sp} devices that share rows" if sp > 1 else ""
        micro, count = f"up to {budget} tokens{shared}", math.ceil(rows * longest / (budget * sp))
    else:
        size = int(node.ppo_micro_batch_size_per_gpu)
        micro, count = f"{size} rows", math.ceil(rows / size)
    return ModelBatches(
        dp_ranks=dp,
        sp_ranks=sp,
        rows_a_rank=math.ceil(prompts * rollout.n / dp),
        mini_batch_prompts=mini,
        mini_batch_rows=mini * int(rollout.n),
        mini_batch_rows_a_rank=rows,
        micro_batch=micro,
        micro_batches=count,
        epochs=epochs,
        optimizer_steps=prompts // mini * epochs,
    )


def _files(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(name) for name in value or []]
