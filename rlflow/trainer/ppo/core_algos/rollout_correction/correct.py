"""The rollout correction of a batch: weights, a mask, and how far the two policies are apart.

Modes: decoupled (three policies: the trainer recomputes `old_log_prob`, calls this once a batch, the weights multiply
the PPO loss) and bypass (two policies: `losses/bypass.py` calls this with the current log-probs inside the loss).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.rollout_correction.cells import Cells
from rlflow.trainer.ppo.core_algos.rollout_correction.metrics import offpolicy_metrics
from rlflow.trainer.ppo.core_algos.rollout_correction.rejection import rejection
from rlflow.trainer.ppo.core_algos.rollout_correction.weights import importance_weights
from rlflow.trainer.ppo.core_algos.valid import valid_log_prob
from rlflow.utils.metric import Metric

PREFIX = "rollout_corr/"


@torch.no_grad()
def compute_rollout_correction(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, cfg: Any
) -> tuple[Tensor | None, Tensor, dict[str, Metric]]:
    """Correct for the gap between the policy that sampled and the policy that trains.

    Args:
        old_log_prob: log-probs of the training policy [B, T].
        rollout_log_prob: log-probs of the rollout policy [B, T].
        response_mask: 1 = model token [B, T].
        cfg: `algorithm.rollout_correction` (mapping): rollout_is, rollout_is_threshold, rollout_is_batch_normalize,
            rollout_rs, rollout_rs_threshold.

    Returns:
        Weights [B, T] fp32 without gradient (None unless rollout_is and its threshold are set), computed from the mask
        before rejection; the mask after rejection, in the dtype of `response_mask`; typed metrics `rollout_corr/*`
        over the mask before rejection. A batch without a valid token has no metrics.

    Raises:
        ValueError, TypeError: shapes that differ, or an option that `thresholds` cannot read.
    """
    if not old_log_prob.shape == rollout_log_prob.shape == response_mask.shape:
        raise ValueError(
            f"old_log_prob {tuple(old_log_prob.shape)}, rollout_log_prob {tuple(rollout_log_prob.shape)} and "
            f"response_mask {tuple(response_mask.shape)} must have one shape"
        )
    cells = Cells(response_mask)
    old, rollout = valid_log_prob(old_log_prob, cells.mask), valid_log_prob(rollout_log_prob, cells.mask)
    weights, mask = None, response_mask
    metrics: dict[str, Metric] = {}
    if cfg.get("rollout_is") is not None and cfg.get("rollout_is_threshold") is not None:
        normalize = bool(cfg.get("rollout_is_batch_normalize"))
        weights, found = importance_weights(
            old - rollout, cells, cfg.get("rollout_is"), cfg.get("rollout_is_threshold"), normalize
        )
        metrics |= found
    if cfg.get("rollout_rs") is not None:
        keep, found = rejection(old - rollout, cells, cfg.get("rollout_rs"), cfg.get("rollout_rs_threshold"))
        mask = response_mask * keep.to(response_mask.dtype)
        metrics |= found
    metrics |= offpolicy_metrics(old, rollout, cells)
    return weights, mask, {f"{PREFIX}{name}": value for name, value in metrics.items()}
