"""Rollout correction: the sampling policy is not quite the policy that trains (other kernels, precision, version).

`compute_rollout_correction` is the whole of it. `rlflow.trainer.ppo.rollout_corr_helper` offers the entry points of
the reference, with plain numbers as metrics.
"""

from __future__ import annotations

from rlflow.trainer.ppo.core_algos.rollout_correction.correct import PREFIX, compute_rollout_correction
from rlflow.trainer.ppo.core_algos.rollout_correction.thresholds import (
    IS_LEVELS,
    RS_OPTIONS,
    Bounds,
    parse_is_threshold,
    parse_rs_options,
    parse_rs_thresholds,
)

__all__ = [
    "IS_LEVELS",
    "PREFIX",
    "RS_OPTIONS",
    "Bounds",
    "compute_rollout_correction",
    "parse_is_threshold",
    "parse_rs_options",
    "parse_rs_thresholds",
]
