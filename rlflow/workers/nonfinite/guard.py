"""What an update does when the gradient of an optimizer step is not finite.

The engine leaves such a step out: weights, moments and step counters stay as they were. Here it is counted, its
mini-batch kept, and the run stopped when the configuration says so. All ranks see the same norm, so all do the same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlflow.utils.errors import NonFiniteGradientError

logger = logging.getLogger(__name__)


class NonFiniteGuard:
    """Counts optimizer steps that were left out.

    Args:
        options: `optim.nonfinite_grad`, `optim.max_skipped_steps` and `optim.nonfinite_dump_every`, see
            `OptimizerConfig`; None for a frozen model.

    Attributes:
        in_a_row: steps left out since the last one that was made.
    """

    def __init__(self, options: Any) -> None:
        options = options or {}
        self._stops = options.get("nonfinite_grad", "skip") == "stop"
        self._limit = int(options.get("max_skipped_steps", 0))
        self._every = int(options.get("nonfinite_dump_every", 0))
        self._events = 0
        self.in_a_row = 0

    def check(self, grad_norm: float, dump: Callable[[int], Path | None]) -> None:
        """Note the gradient norm of an optimizer step. *Collective* when it is not finite.

        Args:
            grad_norm: before clipping, the same on all ranks.
            dump: (number of the event) writes the mini-batch; returns its folder, or None when nothing was written.

        Raises:
            NonFiniteGradientError: the policy is to stop, or too many steps in a row were left out.
        """
        if math.isfinite(grad_norm):
            self.in_a_row = 0
            return
        self.in_a_row += 1
        self._events += 1
        folder = dump(self._events) if self._every and (self._events - 1) % self._every == 0 else None
        where = f"; its mini-batch is in {folder}" if folder else ""
        logger.warning("the gradient norm is %s: this optimizer step is left out%s", grad_norm, where)
        hint = f" `rlflow replay {folder}` names rows, module and parameter." if folder else ""
        if self._stops:
            raise NonFiniteGradientError(
                f"the gradient norm of an optimizer step is {grad_norm} and optim.nonfinite_grad=stop; the step was "
                f"left out.{hint}"
            )
        if self._limit and self.in_a_row >= self._limit:
            raise NonFiniteGradientError(
                f"{self.in_a_row} optimizer steps in a row had a gradient that is not finite "
                f"(optim.max_skipped_steps={self._limit}), so nothing is learned any more.{hint} Go on from an earlier "
                "checkpoint with a smaller learning rate, or mend the data that the dump names."
            )
