"""Rollout correction in a step: what is done about the distance between the engine that sampled and the policy trained.

    decoupled   old_log_probs are computed again; weights and rejection follow once a batch from
                old_log_probs - rollout_log_probs, on the controller, before the advantage
    bypass      the rollout's log-probs are the old log-probs; the loss in the workers corrects with its current ones

`algorithm.rollout_correction` chooses; without weights and rejection the decoupled mode only measures. What the numbers
mean: docs/rollout_correction.md.

Invariant: `loss_mask` follows `response_mask`: the loss divides by the tokens that it uses.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import rlflow.transfer_queue as tq
from rlflow.trainer.ppo.batching import partition_of
from rlflow.trainer.ppo.core_algos.rollout_correction import compute_rollout_correction
from rlflow.transfer_queue import KVBatchMeta
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.nested import nested_lengths, padded_to_nested

WEIGHTS = "rollout_is_weights"
MASKS = ("response_mask", "loss_mask")


def is_bypassed(config: Any) -> bool:
    """Whether the rollout's log-probs stand for the old policy's."""
    settings = config.algorithm.rollout_correction
    return settings is not None and bool(settings.bypass_mode)


def corrected_fields(config: Any) -> tuple[str, ...]:
    """The fields that the decoupled correction of a run writes."""
    settings = config.algorithm.rollout_correction
    if settings is None or settings.bypass_mode:
        return ()
    return (*((WEIGHTS,) if settings.rollout_is else ()), *(MASKS if settings.rollout_rs else ()))


def carry_bypass_settings(config: Any) -> None:
    """Give the workers the loss of the bypass mode and its settings; call it before they are built."""
    from omegaconf import OmegaConf, open_dict

    if not is_bypassed(config):
        return
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    with open_dict(policy_loss):
        policy_loss.loss_mode = "bypass_mode"
        policy_loss.rollout_correction = OmegaConf.to_container(config.algorithm.rollout_correction, resolve=True)


def copy_rollout_log_probs(batch: KVBatchMeta) -> None:
    """Writes the rollout's log-probs as `old_log_probs`; no forward pass."""
    data = tq.kv_batch_get(batch.keys, partition_of(batch), ["rollout_log_probs"])
    tq.kv_batch_put(
        batch.keys, partition_of(batch), fields=tu.get_tensordict({"old_log_probs": data["rollout_log_probs"]})
    )


def correct_rollouts(
    batch: KVBatchMeta, like: Tensor, dense: dict[str, Tensor], settings: Any, metrics: dict[str, Any]
) -> None:
    """Write `rollout_is_weights` (with `rollout_is`) and the masks after rejection (with `rollout_rs`).

    Args:
        batch: the rows.
        like: a response-aligned jagged field of them.
        dense: their `old_log_probs`, `rollout_log_probs` and `response_mask` [B, T].
        settings: `algorithm.rollout_correction`; None: nothing is done, nor measured.
        metrics: gets `rollout_corr/*`.
    """
    if settings is None:
        return
    weights, mask, found = compute_rollout_correction(
        dense["old_log_probs"], dense["rollout_log_probs"], dense["response_mask"], settings
    )
    metrics.update(found)
    written: dict[str, Tensor] = {} if weights is None else {WEIGHTS: weights}
    if settings.rollout_rs:
        written |= dict.fromkeys(MASKS, mask.long())
    if written:
        lengths = nested_lengths(like)
        fields = {name: padded_to_nested(value, lengths) for name, value in written.items()}
        tq.kv_batch_put(batch.keys, partition_of(batch), fields=tu.get_tensordict(fields))
