"""The stages of one step: each takes a batch meta, lets a worker group (or the controller) read and write named
fields, and returns the meta of the same rows.

Options of a call travel in `extra_info`, built fresh each time: nothing leaks from one stage into the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import rlflow.transfer_queue as tq
from rlflow.trainer.ppo import advantage, estimator_inputs, metric_utils, nonfinite, off_policy
from rlflow.trainer.ppo.batching import partition_of, real_rows
from rlflow.trainer.ppo.core_algos import agg_loss
from rlflow.trainer.ppo.replay_buffer import uid_of
from rlflow.trainer.ppo.row_metrics import compute_row_metrics
from rlflow.transfer_queue import KVBatchMeta
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError, RewardError
from rlflow.utils.metric import Metric, merge_metrics
from rlflow.utils.nested import nested_index_select, nested_to_padded

if TYPE_CHECKING:
    from rlflow.trainer.ppo.trainer_base import PPOTrainer

Metrics = dict[str, Any]


def _with_options(batch: KVBatchMeta, **options: Any) -> KVBatchMeta:
    return KVBatchMeta(
        keys=list(batch.keys), tags=batch.tags, partition_id=batch.partition_id, fields=batch.fields, extra_info=options
    )


def compute_old_log_prob(trainer: PPOTrainer, batch: KVBatchMeta, metrics: Metrics) -> KVBatchMeta:
    """Writes `old_log_probs` and `entropy`, where it is wanted `sum_pi_squared`, and the fields of rollout correction.
    Reports entropy and the distance to the rollout engine's log-probs.

    In bypass mode the rollout's log-probs are copied, and nothing else is written or known.
    """
    if off_policy.is_bypassed(trainer.config):
        off_policy.copy_rollout_log_probs(batch)
        return batch
    options = {
        "calculate_entropy": True,
        "calculate_sum_pi_squared": estimator_inputs.wants_sum_pi_squared(trainer.config),
        "compute_loss": False,
        "temperature": trainer.config.actor_rollout_ref.rollout.temperature,
    }
    trainer.runtime.actor_wg.compute_log_prob(_with_options(batch, **options))
    _report_log_probs(trainer, batch, metrics)
    return batch


def _report_log_probs(trainer: PPOTrainer, batch: KVBatchMeta, metrics: Metrics) -> None:
    """Entropy and distance to the rollout engine of the batch's `old_log_probs`, and the rollout correction."""
    rollout = trainer.config.actor_rollout_ref.rollout
    actor = trainer.config.actor_rollout_ref.actor
    names = ["old_log_probs", "entropy", "response_mask", "rollout_log_probs"]
    data = tq.kv_batch_get(batch.keys, partition_of(batch), names, missing_ok=("rollout_log_probs",))
    dense = {name: nested_to_padded(data[name]).float() for name in names if name in data.keys()}  # noqa: SIM118
    mask = dense["response_mask"]
    scale = rollout.response_length if actor.loss_scale_factor is None else actor.loss_scale_factor
    entropy = agg_loss(dense["entropy"], mask, actor.loss_agg_mode, loss_scale_factor=scale)
    metrics["actor/entropy"] = entropy.item()
    if rollout.calculate_log_probs:
        if "rollout_log_probs" not in dense:
            raise ContractError(
                "rollout.calculate_log_probs=true but some trajectory has no rollout_log_probs; "
                "a custom agent loop must set response_logprobs on every output"
            )
        metrics.update(metric_utils.compute_log_prob_metrics(dense["old_log_probs"], dense["rollout_log_probs"], mask))
        settings = trainer.config.algorithm.rollout_correction
        off_policy.correct_rollouts(batch, data["response_mask"], dense, settings, metrics)


def compute_ref_log_prob(trainer: PPOTrainer, batch: KVBatchMeta) -> KVBatchMeta:
    """Writes `ref_log_prob`."""
    options = {
        "calculate_entropy": False,
        "compute_loss": False,
        "temperature": trainer.config.actor_rollout_ref.rollout.temperature,
    }
    trainer.runtime.ref_policy_wg.compute_ref_log_prob(_with_options(batch, **options))
    return batch


def compute_values(trainer: PPOTrainer, batch: KVBatchMeta) -> KVBatchMeta:
    """Writes `values`."""
    trainer.runtime.critic_wg.compute_values(_with_options(batch))
    return batch


def compute_advantage(trainer: PPOTrainer, batch: KVBatchMeta, metrics: Metrics) -> KVBatchMeta:
    """Writes `advantages` and `returns`, and the data metrics of the batch."""
    _refuse_a_step_without_rewards(batch)
    algorithm = trainer.config.algorithm
    optional = estimator_inputs.optional_fields(trainer.config)
    names = ["response_mask", "rm_scores", *optional]
    data = tq.kv_batch_get(batch.keys, partition_of(batch), names, missing_ok=optional)
    rewards = data["rm_scores"]
    if trainer.kl_controller is not None:
        rewards, kl_metrics = advantage.apply_kl_penalty(data, trainer.kl_controller, algorithm.kl_penalty)
        metrics.update(kl_metrics)
    more: dict[str, Any] = {}
    if algorithm.adv_estimator == "remax":
        more["reward_baselines"] = estimator_inputs.reward_baselines(batch, metrics)
    if algorithm.gdpo_reward_keys:
        more["components"] = estimator_inputs.reward_components(batch, list(algorithm.gdpo_reward_keys), metrics)
    advantages, returns = advantage.compute_advantages(batch.keys, data, algorithm, rewards=rewards, **more)
    written = {"advantages": advantages, "returns": returns}
    if trainer.kl_controller is not None:
        written["token_level_rewards"] = rewards
    tq.kv_batch_put(batch.keys, partition_of(batch), fields=tu.get_tensordict(written))

    rows = real_rows(batch)
    select = torch.tensor(rows)
    tags = [batch.tags[row] for row in rows]
    limits = (trainer.config.data.max_prompt_length, trainer.config.data.max_response_length)
    fields = {name: data[name] for name in ("response_mask", "rm_scores", "values") if name in data.keys()} | written  # noqa: SIM118
    shown = {name: nested_index_select(value, select) for name, value in fields.items()}
    shown_rewards = shown.get("token_level_rewards", shown["rm_scores"])
    metrics.update(metric_utils.step_data_metrics(shown, shown_rewards, tags, limits))
    metrics.update(metric_utils.compute_version_metrics(tags, trainer.global_steps))
    return batch


def _refuse_a_step_without_rewards(batch: KVBatchMeta) -> None:
    """A step in which every sample is masked would train on nothing, step after step: stop and say why."""
    tags = [batch.tags[row] for row in real_rows(batch)]
    reasons = [tag.get("invalid") for tag in tags]
    if all(reasons):
        raise RewardError(
            f"All {len(reasons)} samples of this step have an invalid reward. First reason: {reasons[0]}. Check "
            "reward.custom_reward_function and the data_source column; reward.timeout_s bounds each call."
        )


def update_critic(trainer: PPOTrainer, batch: KVBatchMeta, metrics: Metrics) -> None:
    """One pass (or `ppo_epochs`) of mini-batch updates of the critic over the batch."""
    options = _update_options(trainer.config.critic, trainer.config.actor_rollout_ref.rollout.n)
    with nonfinite.watched(trainer, "critic", metrics) as dump:
        output = trainer.runtime.critic_wg.update_critic(_with_options(batch, **options, **dump))
        merge_worker_metrics(metrics, tu.get(output, "metrics"), "critic")


def fuses_old_log_prob(trainer: PPOTrainer, batch: KVBatchMeta) -> bool:
    """Whether the update of this batch gives its `old_log_probs`: it is asked to, and makes a single optimizer step."""
    actor, sessions = trainer.config.actor_rollout_ref.actor, trainer.config.actor_rollout_ref.rollout.n
    one_step = len(batch) == actor.ppo_mini_batch_size * sessions  # sessions of several outputs have more rows
    return bool(actor.fuse_old_log_prob) and one_step and trainer.updates_actor()


def update_actor(trainer: PPOTrainer, batch: KVBatchMeta, metrics: Metrics) -> None:
    """One pass (or `ppo_epochs`) of mini-batch updates of the policy over the batch.

    Fused with the log-prob pass it also writes `old_log_probs` and `entropy`, and reports what `compute_old_log_prob`
    does.
    """
    actor = trainer.config.actor_rollout_ref.actor
    rollout = trainer.config.actor_rollout_ref.rollout
    fused = fuses_old_log_prob(trainer, batch)
    options = _update_options(actor, rollout.n) | {
        "calculate_entropy": bool(actor.calculate_entropy or actor.entropy_coeff != 0),
        "temperature": rollout.temperature,
        "fuse_old_log_prob": fused,
    }
    with nonfinite.watched(trainer, "actor", metrics) as dump:
        output = trainer.runtime.actor_wg.update_actor(_with_options(batch, **options, **dump))
        # A batch with rows went to the queue and comes back as its meta, with the metrics of each rank; all say the
        # same.
        merge_worker_metrics(metrics, output.extra_info["metrics"][0] if fused else tu.get(output, "metrics"), "actor")
    if fused:
        _report_log_probs(trainer, batch, metrics)


def _update_options(node: Any, sessions: int) -> dict[str, Any]:
    """How the workers go over a batch by the `actor` or `critic` node; `sessions` rows a prompt."""
    rows = node.ppo_mini_batch_size * sessions
    return {
        "global_batch_size": rows,
        "mini_batch_size": rows,
        "epochs": node.ppo_epochs,
        "seed": node.data_loader_seed,
        "dataloader_kwargs": {"shuffle": bool(node.shuffle)},
    }


def merge_worker_metrics(metrics: Metrics, reported: dict[str, Any], prefix: str) -> None:
    """Worker metrics under `{prefix}/`; `mfu` goes to `perf/mfu/{prefix}`, `rollout_corr/*` keep their names."""
    for name, value in reported.items():
        name = name if name.startswith((f"{prefix}/", "rollout_corr/")) else f"{prefix}/{name}"
        if name in (f"{prefix}/mfu", f"{prefix}/perf/mfu"):
            name = f"perf/mfu/{prefix}"
        merged: dict[str, Metric] = {}
        for item in value if isinstance(value, list) else [value]:
            merge_metrics(merged, {name: item})
        metrics.update(merged)


def compute_step_metrics(trainer: PPOTrainer, batch: KVBatchMeta, metrics: Metrics, timing: dict[str, float]) -> None:
    """What is known once the step is over: progress, turns, timing and throughput."""
    rows = real_rows(batch)
    names, optional = ["num_turns", "metrics", "extra_fields"], ("metrics", "extra_fields")
    data = tq.kv_batch_get([batch.keys[row] for row in rows], partition_of(batch), names, missing_ok=optional)
    metrics.update(metric_utils.spread("training/num_turns", torch.as_tensor(tu.get(data, "num_turns"))))
    metrics.update(compute_row_metrics([batch.keys[row] for row in rows], [batch.tags[row] for row in rows], data))
    response_tokens = sum(int(batch.tags[row]["response_len"]) for row in rows)
    all_tokens = sum(int(tag["seq_len"]) for tag in batch.tags)
    metrics.update(metric_utils.step_timing_metrics(timing, response_tokens, all_tokens))
    metrics.update(metric_utils.compute_throughput_metrics(timing, all_tokens, trainer.runtime.n_devices))
    if estimator_inputs.wants_sum_pi_squared(trainer.config):
        metrics.update(_variance_proxies([batch.keys[row] for row in rows], partition_of(batch), metrics))
    metrics["training/global_step"] = trainer.global_steps
    metrics["training/epoch"] = trainer.feed.epoch_of(uid_of(batch.keys[row]) for row in rows)


def _variance_proxies(keys: list[str], partition: str, metrics: Metrics) -> dict[str, float]:
    """Signal and noise of the gradient; its norm is that of the step's update, unknown when only the critic trains."""
    optional = ("rollout_is_weights",)
    names = ["sum_pi_squared", "old_log_probs", "advantages", "response_mask", *optional]
    data = tq.kv_batch_get(keys, partition, names, missing_ok=optional)
    norm = metrics.get("actor/grad_norm")
    return metric_utils.compute_variance_proxy_metrics(data, None if norm is None else norm.aggregate())
