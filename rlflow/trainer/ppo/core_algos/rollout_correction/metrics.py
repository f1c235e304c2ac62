"""How far the rollout policy is from the training policy, on the tokens that were sampled.

With p = pi_train, q = pi_rollout, u = log p - log q, and means over the valid tokens (rows):
    kl = mean(-u), k3_kl = mean(exp(u) - u - 1)                      both estimate KL(q || p) in nats
    chi2_token = mean(exp(u)^2) - 1, chi2_seq = mean over rows of exp(sum u)^2, minus 1
    log_ppl = mean over rows of minus the row's mean log-prob, ppl the mean of its exponential
Ratios are bounded at e^20 and perplexities at e^80, so that all stay finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.aggregate import masked_sum
from rlflow.trainer.ppo.core_algos.rollout_correction.cells import Cells, Readings
from rlflow.trainer.ppo.core_algos.valid import bounded_exp
from rlflow.utils.metric import Metric

# e^80 = 5.5e34 is finite in fp32.
_LARGEST_LOG_PPL = 80.0


@torch.no_grad()
def offpolicy_metrics(old_log_prob: Tensor, rollout_log_prob: Tensor | None, cells: Cells) -> dict[str, Metric]:
    """Metrics without prefix; only those of the training policy when `rollout_log_prob` is None.

    Args:
        old_log_prob: log p [B, T], zero outside the mask.
        rollout_log_prob: log q [B, T], zero outside the mask, or None.
        cells: the valid tokens; {} when there is none.
    """
    if not cells.tokens:
        return {}
    readings = Readings(cells)
    training = cells.row_means(old_log_prob)
    readings.row_mean("training_ppl", _ppl(-training))
    readings.row_mean("training_log_ppl", -training.mean())
    if rollout_log_prob is None:
        return readings.metrics()
    u = cells.of_tokens(old_log_prob - rollout_log_prob)
    readings.token_mean("kl", -u.mean())
    readings.token_mean("k3_kl", (bounded_exp(u) - u - 1).mean())
    rollout = cells.row_means(rollout_log_prob)
    readings.row_mean("rollout_ppl", _ppl(-rollout))
    readings.row_mean("rollout_log_ppl", -rollout.mean())
    difference = rollout - training
    readings.row_mean("log_ppl_diff", difference.mean())
    readings.row_mean("log_ppl_abs_diff", difference.abs().mean())
    readings.highest("log_ppl_diff_max", difference.max())
    readings.lowest("log_ppl_diff_min", difference.min())
    readings.row_mean("ppl_ratio", _ppl(difference))
    readings.token_mean("chi2_token", bounded_exp(u).square().mean() - 1)
    row_sums = cells.of_rows(masked_sum(old_log_prob - rollout_log_prob, cells.mask, axis=-1))
    readings.row_mean("chi2_seq", bounded_exp(row_sums).square().mean() - 1)
    return readings.metrics()


def _ppl(log_ppl: Tensor) -> Tensor:
    return log_ppl.clamp(max=_LARGEST_LOG_PPL).exp().mean()
