"""Direct reward optimisation: a policy gradient with a quadratic pull towards the old policy.

L = -(A log_prob - beta / 2 (log_prob - old_log_prob)^2)                   Richemond et al. 2024, arXiv 2405.19107
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlflow.trainer.ppo.core_algos.losses.inputs import prepare
from rlflow.trainer.ppo.core_algos.losses.options import positive_option
from rlflow.trainer.ppo.core_algos.registry import register_policy_loss


@register_policy_loss("dro")
def compute_policy_loss_dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """DRO; all tensors [B, T]. Option: policy_loss.dro_beta > 0 (ValueError otherwise; there is no default).

    Returns the scalar loss and `actor/ppo_kl` (nats).
    """
    inputs = prepare(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    beta = positive_option(config, "dro_beta")
    log_ratio = inputs.log_ratio
    losses = 0.5 * beta * log_ratio.square() - inputs.advantages * inputs.new
    return inputs.aggregate(losses, loss_agg_mode, config), inputs.means({"actor/ppo_kl": -log_ratio})
