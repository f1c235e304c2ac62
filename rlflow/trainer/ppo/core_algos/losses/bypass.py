"""Bypass mode: the rollout's log-probs are the old ones, and the correction happens inside the loss.

old_log_prob = log-probs of the rollout policy; weights w and the surviving mask come from the CURRENT log-probs:
    loss_type ppo_clip      vanilla on the surviving mask, without w (its clipped ratio already starts at the rollout)
    loss_type reinforce     -A log_prob w on the surviving mask

Two policies instead of three: no pass that recomputes the old log-probs. The mini-batch counts of `agg_loss` are those
before rejection, since the loss alone knows which tokens survive: a rejected token weighs as one with loss 0. Without
such counts (a loss called by itself) the surviving tokens are the denominator.

`rollout_is_batch_normalize` divides by the mean weight of the micro-batch. There is no collective in a loss: ranks may
have different numbers of micro-batches.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlflow.trainer.ppo.core_algos.losses.options import option
from rlflow.trainer.ppo.core_algos.losses.reinforce import compute_policy_loss_reinforce
from rlflow.trainer.ppo.core_algos.losses.vanilla import compute_policy_loss_vanilla
from rlflow.trainer.ppo.core_algos.registry import register_policy_loss
from rlflow.trainer.ppo.core_algos.rollout_correction import compute_rollout_correction
from rlflow.utils.metric import AggregationType, Metric

LOSS_TYPES = ("ppo_clip", "reinforce")


@register_policy_loss("bypass_mode")
def compute_policy_loss_bypass_mode(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Two-policy loss; all tensors [B, T], `old_log_prob` from the rollout.

    Options: `policy_loss.rollout_correction` (ValueError when missing), which the trainer fills from
    `algorithm.rollout_correction`. `rollout_is_weights` is not read: the weights are made here.

    Returns the scalar loss, the metrics of the inner loss over surviving tokens, and typed `rollout_corr/*`.
    """
    correction = option(config, "rollout_correction")
    if correction is None:
        raise ValueError(
            "policy_loss.loss_mode=bypass_mode needs policy_loss.rollout_correction; the trainer fills it when "
            "algorithm.rollout_correction.bypass_mode=true"
        )
    loss_type = correction.get("loss_type", "ppo_clip")
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"rollout_correction.loss_type={loss_type!r} is unknown; choose from {LOSS_TYPES}")
    weights, mask, metrics = compute_rollout_correction(log_prob, old_log_prob, response_mask, correction)
    if loss_type == "reinforce":
        loss, inner = compute_policy_loss_reinforce(
            old_log_prob, log_prob, advantages, mask, loss_agg_mode, config, weights
        )
    else:
        loss, inner = compute_policy_loss_vanilla(old_log_prob, log_prob, advantages, mask, loss_agg_mode, config)
    surviving = float(mask.sum())
    return loss, {**Metric.from_dict(inner, AggregationType.MEAN, weight=surviving), **metrics}
