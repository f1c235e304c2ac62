"""Group policy gradient: the score function, without ratio and clip.

L = -A log_prob                                    Chu et al. 2025, arXiv 2504.02546 (objective of GPG)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlflow.trainer.ppo.core_algos.losses.inputs import prepare
from rlflow.trainer.ppo.core_algos.registry import register_policy_loss


@register_policy_loss("gpg")
def compute_policy_loss_gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """GPG; all tensors [B, T]; no options, no metrics. `old_log_prob` is not used."""
    inputs = prepare(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    return inputs.aggregate(-inputs.advantages * inputs.new, loss_agg_mode, config), {}
