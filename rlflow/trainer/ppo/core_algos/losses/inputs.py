"""What every policy loss starts from and ends with.

    inputs = prepare(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    losses = ...                                          # [B, T], from inputs.new, inputs.old, inputs.advantages
    return inputs.aggregate(losses, loss_agg_mode, config), inputs.means({"actor/ppo_kl": -inputs.log_ratio})

`prepare` keeps NaN outside the mask away from value and gradient, so that a loss is written as its formula is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.aggregate import agg_loss, masked_mean
from rlflow.trainer.ppo.core_algos.losses.options import global_counts
from rlflow.trainer.ppo.core_algos.valid import LOG_RATIO_BOUND, only_valid, valid_log_prob


@dataclass(frozen=True)
class LossInputs:
    """Safe inputs, all [B, T]; zeros outside `mask` (bool). `new` carries the gradient; `weights` may be None."""

    old: Tensor
    new: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None

    @property
    def log_ratio(self) -> Tensor:
        """log pi_new - log pi_old, as it is."""
        return self.new - self.old

    @property
    def bounded_log_ratio(self) -> Tensor:
        """`log_ratio` within [-20, 20]: its exponential is finite; no gradient outside."""
        return self.log_ratio.clamp(min=-LOG_RATIO_BOUND, max=LOG_RATIO_BOUND)

    def aggregate(self, losses: Tensor, loss_agg_mode: str, config: Any) -> Tensor:
        """Loss per token [B, T] x importance weights -> scalar, by the counts of the mini-batch (`agg_loss`)."""
        weighted = losses if self.weights is None else losses * self.weights
        return agg_loss(weighted, self.mask, loss_agg_mode, **global_counts(config))

    def means(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """Token means of several [B, T] tensors as floats; one transfer from the device."""
        return token_means(tensors, self.mask)


def prepare(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    rollout_is_weights: Tensor | None = None,
) -> LossInputs:
    """The inputs of a policy loss, all [B, T], in at least fp32 and safe outside the mask."""
    mask = response_mask.bool()
    return LossInputs(
        old=valid_log_prob(old_log_prob, mask).detach(),
        new=valid_log_prob(log_prob, mask),
        advantages=only_valid(advantages, mask).detach(),
        mask=mask,
        weights=None if rollout_is_weights is None else only_valid(rollout_is_weights, mask).detach(),
    )


@torch.no_grad()
def token_means(tensors: Mapping[str, Tensor], mask: Tensor) -> dict[str, float]:
    """Masked means of [B, T] tensors (bool counts as 0 / 1) as floats, with one transfer from the device."""
    if not tensors:
        return {}
    means = [masked_mean(tensor.to(torch.float32), mask) for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack(means).tolist(), strict=True))
