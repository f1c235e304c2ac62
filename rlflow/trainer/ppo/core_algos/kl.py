"""KL between policy and reference, per token, and the coefficient of its penalty.

With d = log p - log q for a token sampled from p (Schulman 2020, "Approximating KL divergence"):
    k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d
k1 and k3 are unbiased for KL(p || q) as values; only k2 has the right gradient when differentiated through log p. The
suffix "+" therefore keeps the value of an estimator and takes the gradient of k2 (straight-through).

Half-precision inputs are computed in fp32. A log-prob of -inf counts as `LOG_PROB_FLOOR`, so that d stays finite.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

from rlflow.trainer.ppo.core_algos.valid import valid_log_prob

logger = logging.getLogger(__name__)

# A batch of many rows beside a short horizon at most halves the coefficient: 0 or less could not come back.
SMALLEST_FACTOR = 0.5


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """The estimator `kl_penalty` (kl | k1, abs, mse | k2, low_var_kl | k3), elementwise; any shape."""
    difference = valid_log_prob(logprob) - valid_log_prob(ref_logprob)
    if kl_penalty in ("kl", "k1"):
        return difference
    if kl_penalty == "abs":
        return difference.abs()
    if kl_penalty in ("mse", "k2"):
        return 0.5 * difference.square()
    if kl_penalty in ("low_var_kl", "k3"):
        x = torch.clamp(-difference, min=-20, max=20)
        return torch.clamp(torch.exp(x) - x - 1, min=-10, max=10)
    raise NotImplementedError(
        f"KL estimator {kl_penalty!r}; choose from kl/k1, abs, mse/k2, low_var_kl/k3, each also with +"
    )


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """`kl_penalty_forward`, where a trailing "+" takes the gradient of k2."""
    if not kl_penalty.endswith("+"):
        return kl_penalty_forward(logprob, ref_logprob, kl_penalty)
    value = kl_penalty_forward(logprob, ref_logprob, kl_penalty[:-1])
    carrier = kl_penalty_forward(logprob, ref_logprob, "k2")
    return carrier - carrier.detach() + value.detach()


class FixedKLController:
    """A constant coefficient."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, float]:
        """The coefficient, for checkpoints."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take the coefficient of a checkpoint."""


class AdaptiveKLController(FixedKLController):
    """Proportional control towards a target KL (Ziegler et al. 2019, section 2.2).

    value *= max(1 + clip(current / target - 1, -0.2, 0.2) * n_steps / horizon, 0.5)
    A KL that is no finite number (one NaN in one row) says nothing about the policy and leaves the value as it is.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        super().__init__(init_kl_coef)
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt after a batch of `n_steps` rows with mean KL `current_kl` (nats)."""
        if not math.isfinite(current_kl):
            return
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= max(1 + error * n_steps / self.horizon, SMALLEST_FACTOR)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take the coefficient of a checkpoint; one that is no finite number would make every reward NaN."""
        if not math.isfinite(state["value"]):
            logger.warning("the checkpoint has a KL coefficient of %s; starting at %s", state["value"], self.value)
            return
        self.value = state["value"]


def get_kl_controller(kl_ctrl: Any) -> FixedKLController:
    """The controller of an `algorithm.kl_ctrl` node (type fixed | adaptive)."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_coef=kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        if kl_ctrl.horizon <= 0:
            raise ValueError(f"algorithm.kl_ctrl.horizon={kl_ctrl.horizon} must be > 0")
        return AdaptiveKLController(init_kl_coef=kl_ctrl.kl_coef, target_kl=kl_ctrl.target_kl, horizon=kl_ctrl.horizon)
    raise NotImplementedError(f"algorithm.kl_ctrl.type={kl_ctrl.type!r}; choose fixed or adaptive")
