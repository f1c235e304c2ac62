"""Token-level rewards: the score of each token minus a KL penalty."""

from __future__ import annotations

from torch import Tensor


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """r = score - kl_ratio (old - ref), elementwise: the penalty of Ziegler et al. 2019, eq. 2, with the k1 estimator.

    Args:
        token_level_scores: [B, T].
        old_log_prob, ref_log_prob: [B, T] log-probs of the sampled tokens, nats.
        kl_ratio: the coefficient.
    """
    return token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)
