"""REINFORCE on samples of the rollout policy, optionally importance weighted.

L = -A log_prob [w]                                Williams 1992 (REINFORCE); w: weights of the rollout correction
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlflow.trainer.ppo.core_algos.losses.inputs import prepare


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Policy gradient with weights; all tensors [B, T]. Not registered: `bypass_mode` calls it.

    Returns the scalar loss and `actor/ppo_kl` (mean of rollout - current log-prob, nats).
    """
    inputs = prepare(rollout_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    loss = inputs.aggregate(-inputs.advantages * inputs.new, loss_agg_mode, config)
    return loss, inputs.means({"actor/ppo_kl": -inputs.log_ratio})
