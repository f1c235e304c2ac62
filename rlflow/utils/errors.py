"""Errors a user can act on.

Every message says what was set or what happened, why it cannot work, and what to try. The classes exist so that callers
can tell a user's mistake (`ConfigError`, `DataError`) from a broken promise inside the system (`ContractError`).
"""

from __future__ import annotations


class RlflowError(Exception):
    """Base of all errors raised on purpose by rlflow."""


class ConfigError(RlflowError, ValueError):
    """The configuration cannot work. Raised before Ray starts whenever possible."""


class DataError(RlflowError, ValueError):
    """A data file or a row of it cannot be used; the message names file and row."""


class ContractError(RlflowError):
    """Two parts of the system disagree about fields, shapes or state."""


class DeadlineError(RlflowError, TimeoutError):
    """A wait ended without its event; the message names what was awaited and for how long."""


class WeightSyncError(RlflowError):
    """Rollout replicas do not hold the weights the trainer sent.

    Attributes:
        phase: of the sync, as `checkpoint_engine.phases.Phase` names it ("transfer"); None where it is not known.
        replicas: ranks of the replicas concerned.
        tensors: names of those that are missing, unknown or different.
        lost: whether the replicas did not answer (dead or hung), instead of holding something else.
    """

    def __init__(
        self,
        message: str,
        *,
        phase: str | None = None,
        replicas: tuple[int, ...] = (),
        tensors: tuple[str, ...] = (),
        lost: bool = False,
    ) -> None:
        super().__init__(message)
        self.phase, self.replicas, self.tensors, self.lost = phase, tuple(replicas), tuple(tensors), lost


class CheckpointError(RlflowError):
    """A checkpoint cannot be written or read."""


class RewardError(RlflowError):
    """Rewards of a whole step are unusable."""


class NonFiniteGradientError(RlflowError):
    """Gradients are NaN or infinite, and the configuration says to stop."""
