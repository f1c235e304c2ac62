"""An advantage estimator of one's own: the score minus the median of the group.

    actor_rollout_ref.model.external_lib=examples/custom_estimator/group_median.py
    algorithm.adv_estimator=group_median

GRPO's baseline is the mean of the n answers to a prompt. One answer with an odd score moves the mean, and with it the
advantage of all the others; it does not move the median.

    A_i = s_i - median of s_j over the answers j to the same prompt,     s_i = sum over the tokens of row i

Every process of a run imports the file named by `external_lib`, so the decorator runs wherever the name is looked up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos import register_adv_est


@register_adv_est("group_median")
@torch.no_grad()
def group_median(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Median-centred advantages.

    Args:
        token_level_rewards: [B, T].
        response_mask: [B, T], 1 = token of the model.
        index: [B], equal for the answers to one prompt.
        config: the `algorithm` node of the configuration, with any keys you add to it.
        **kwargs: the other fields of the batch; an estimator takes what it wants and ignores the rest.

    Returns:
        (advantages [B, T], returns [B, T]); equal here, as there is no critic.
    """
    scores = token_level_rewards.sum(dim=-1)
    _, group = np.unique(np.asarray(index), return_inverse=True)
    rows = torch.as_tensor(group, device=scores.device)
    centred = torch.empty_like(scores)
    for number in range(int(rows.max()) + 1):
        members = rows == number
        centred[members] = scores[members] - scores[members].quantile(0.5)
    advantages = centred.unsqueeze(-1) * response_mask
    return advantages, advantages
