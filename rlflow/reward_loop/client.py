"""Asks the reward workers: the one with the fewest calls of this process, and another when it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from rlflow.reward_loop.result import Invalid, RewardInput, RewardResult, one_line
from rlflow.utils.ray_utils import ray_await

logger = logging.getLogger(__name__)

ATTEMPTS = 4
RETRY_PAUSE_S = 1.0


class RewardWorkerClient:
    """Scores trajectories.

    Args:
        handles: actor handles of `RewardLoopWorker`.
    """

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = list(handles)
        self._load = [0] * len(self._handles)

    def __bool__(self) -> bool:
        return bool(self._handles)

    async def score(self, data: RewardInput) -> RewardResult:
        """Score one trajectory. A dead worker's call goes to another one; only when all fail it is `Invalid`."""
        from ray.exceptions import RayActorError, RayError

        failure: BaseException | None = None
        failed: set[int] = set()
        for attempt in range(ATTEMPTS):
            if attempt and len(failed) == len(self._handles):
                await asyncio.sleep(RETRY_PAUSE_S * attempt)  # Ray restarts them meanwhile
                failed.clear()
            index = min((i for i in range(len(self._handles)) if i not in failed), key=self._load.__getitem__)
            self._load[index] += 1
            try:
                # The caller holds the deadline; the worker holds the scorer's.
                return await ray_await(
                    self._handles[index].compute_score.remote(data), what=f"reward worker {index}", timeout_s=None
                )
            except RayActorError as error:
                failure = error
                failed.add(index)
                logger.warning("reward worker %d died or is away (attempt %d of %d)", index, attempt + 1, ATTEMPTS)
            except RayError as error:
                return Invalid(one_line(f"the reward worker raised {error}"))
            finally:
                self._load[index] -= 1
        return Invalid(one_line(f"no reward worker answers: {failure}"))
