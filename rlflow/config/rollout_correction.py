"""`algorithm.rollout_correction`: what is done about the gap between rollout and training policy, and presets of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlflow.config.base import BaseConfig

_GEO_RANGE = "0.999_1.001"


@dataclass
class RolloutCorrectionConfig(BaseConfig):
    """Options of `rlflow.trainer.ppo.core_algos.rollout_correction`; the meaning of bounds is in `thresholds` there.

    A preset is a class method: `RolloutCorrectionConfig.decoupled_seq_is(threshold=2.0)`. Names: `decoupled_*` weights
    or rejects against recomputed old log-probs, `bypass_*` takes the rollout's log-probs as the old ones (`ppo_clip`:
    clipped loss, `pg`: policy gradient); `token_is`/`seq_is`/`*_tis` truncated importance weights, `icepop` weights of
    0 outside a range, `geo_rs` rejection of rows by the geometric mean of their ratios, `k3_rs` by their mean k3.
    """

    rollout_is: str | None = None
    rollout_is_threshold: Any = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: Any = None
    bypass_mode: bool = False
    loss_type: str = "ppo_clip"

    # --- decoupled: three policies ------------------------------------------------------------------------------------

    @classmethod
    def decoupled_token_is(cls, threshold: float = 2.0) -> RolloutCorrectionConfig:
        """Truncated weights a token."""
        return cls(rollout_is="token", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_seq_is(cls, threshold: float = 2.0) -> RolloutCorrectionConfig:
        """Truncated weights a row."""
        return cls(rollout_is="sequence", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_token_icepop(cls, threshold: float = 5.0, threshold_lower: float = 0.5) -> RolloutCorrectionConfig:
        """Weights a token, 0 outside [threshold_lower, threshold]."""
        return cls(rollout_is="token", rollout_is_threshold=_range(threshold_lower, threshold))

    @classmethod
    def decoupled_seq_is_rs(
        cls, is_threshold: float = 2.0, rs_threshold: float | str = "0.5_2.0"
    ) -> RolloutCorrectionConfig:
        """Truncated weights a row, and rejection of rows by the product of their ratios."""
        return cls._weighted("sequence", is_threshold, rollout_rs="seq_sum_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_geo_rs(cls, rs_threshold: float | str = _GEO_RANGE) -> RolloutCorrectionConfig:
        """Rejection of rows by the geometric mean of their ratios."""
        return cls(rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_geo_rs_seq_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float | str = _GEO_RANGE
    ) -> RolloutCorrectionConfig:
        """`decoupled_geo_rs` and truncated weights a row."""
        return cls._weighted("sequence", is_threshold, rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_geo_rs_token_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float | str = _GEO_RANGE
    ) -> RolloutCorrectionConfig:
        """`decoupled_geo_rs` and truncated weights a token."""
        return cls._weighted("token", is_threshold, rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_k3_rs(cls, rs_threshold: float | str = 0.01) -> RolloutCorrectionConfig:
        """Rejection of rows by their mean k3."""
        return cls(rollout_rs="seq_mean_k3", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_k3_rs_seq_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float | str = 0.01
    ) -> RolloutCorrectionConfig:
        """`decoupled_k3_rs` and truncated weights a row."""
        return cls._weighted("sequence", is_threshold, rollout_rs="seq_mean_k3", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_k3_rs_token_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float | str = 0.01
    ) -> RolloutCorrectionConfig:
        """`decoupled_k3_rs` and truncated weights a token."""
        return cls._weighted("token", is_threshold, rollout_rs="seq_mean_k3", rollout_rs_threshold=rs_threshold)

    # --- bypass: two policies -----------------------------------------------------------------------------------------

    @classmethod
    def bypass_ppo_clip(cls) -> RolloutCorrectionConfig:
        """The clipped loss against the rollout's log-probs."""
        return cls(bypass_mode=True)

    @classmethod
    def bypass_ppo_clip_geo_rs(cls, rs_threshold: float | str = _GEO_RANGE) -> RolloutCorrectionConfig:
        """`bypass_ppo_clip` with rejection of rows by the geometric mean of their ratios."""
        return cls(bypass_mode=True, rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def bypass_ppo_clip_k3_rs(cls, rs_threshold: float | str = 0.01) -> RolloutCorrectionConfig:
        """`bypass_ppo_clip` with rejection of rows by their mean k3."""
        return cls(bypass_mode=True, rollout_rs="seq_mean_k3", rollout_rs_threshold=rs_threshold)

    @classmethod
    def bypass_pg_is(cls, threshold: float = 2.0) -> RolloutCorrectionConfig:
        """Policy gradient with truncated weights a row."""
        return cls._policy_gradient(rollout_is="sequence", rollout_is_threshold=threshold)

    @classmethod
    def bypass_pg_token_icepop(cls, threshold: float = 5.0, threshold_lower: float = 0.5) -> RolloutCorrectionConfig:
        """Policy gradient with weights a token, 0 outside [threshold_lower, threshold]."""
        return cls._policy_gradient(rollout_is="token", rollout_is_threshold=_range(threshold_lower, threshold))

    @classmethod
    def bypass_pg_geo_rs(cls, rs_threshold: float | str = _GEO_RANGE) -> RolloutCorrectionConfig:
        """Policy gradient without weights, rejection of rows by the geometric mean of their ratios."""
        return cls._policy_gradient(rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def bypass_pg_geo_rs_seq_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float | str = _GEO_RANGE
    ) -> RolloutCorrectionConfig:
        """`bypass_pg_geo_rs` with truncated weights a row."""
        return cls._policy_gradient(
            rollout_is="sequence",
            rollout_is_threshold=is_threshold,
            rollout_rs="seq_mean_k1",
            rollout_rs_threshold=rs_threshold,
        )

    @classmethod
    def bypass_pg_geo_rs_token_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float | str = _GEO_RANGE
    ) -> RolloutCorrectionConfig:
        """`bypass_pg_geo_rs` with truncated weights a token."""
        return cls._policy_gradient(
            rollout_is="token",
            rollout_is_threshold=is_threshold,
            rollout_rs="seq_mean_k1",
            rollout_rs_threshold=rs_threshold,
        )

    # --- neither ------------------------------------------------------------------------------------------------------

    @classmethod
    def disabled(cls) -> RolloutCorrectionConfig:
        """No weights, no rejection: only the metrics of the gap."""
        return cls()

    @classmethod
    def _weighted(cls, level: str, is_threshold: float, **rejection: Any) -> RolloutCorrectionConfig:
        return cls(rollout_is=level, rollout_is_threshold=is_threshold, **rejection)

    @classmethod
    def _policy_gradient(cls, **options: Any) -> RolloutCorrectionConfig:
        return cls(bypass_mode=True, loss_type="reinforce", **options)


def _range(lower: float, upper: float) -> str:
    return f"{float(lower)}_{float(upper)}"
