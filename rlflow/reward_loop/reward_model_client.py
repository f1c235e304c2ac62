"""How reward workers ask the servers of a reward model: the least busy one, and another when it dies.

Small and picklable: it goes to every reward worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from rlflow.utils.errors import DeadlineError, RlflowError
from rlflow.utils.ray_utils import ray_await
from rlflow.workers.rollout.base import RolloutError

logger = logging.getLogger(__name__)

# What the client waits beyond the server's own deadline, which has the better message.
GRACE_S = 15.0
# Ray restarts a server meanwhile.
RETRY_PAUSE_S = 1.0

Conversation = Sequence[Mapping[str, Any]] | str


class RewardModelClient:
    """Asks for scores.

    Args:
        servers: actor handles (`HFScoringServer`), at least one.
        timeout_s: seconds until a score, waiting and restarts of servers included.
    """

    def __init__(self, servers: Sequence[Any], timeout_s: float) -> None:
        self._servers = list(servers)
        self.timeout_s = timeout_s
        self._load = [0] * len(self._servers)
        self._dead: set[int] = set()

    async def score(self, conversation: Conversation) -> float:
        """The model's number for a conversation (messages with role and content), or for a text as it is.

        Raises:
            ContractError: the conversation cannot be scored.
            DeadlineError: no score in time.
            RolloutError: no server is left, or the model failed.
        """
        from ray.exceptions import ActorDiedError, RayActorError

        deadline = monotonic() + self.timeout_s
        away: set[int] = set()
        while True:
            living = [i for i in range(len(self._servers)) if i not in self._dead]
            if not living:
                raise RolloutError(
                    f"all {len(self._servers)} servers of the reward model died and were not restarted; their logs in "
                    "the Ray session directory say why (out of memory?)"
                )
            index = min((i for i in living if i not in away), key=self._load.__getitem__, default=None)
            if index is None:
                away.clear()
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            left = deadline - monotonic()
            if left <= 0:
                raise DeadlineError(f"the reward model's servers were away for {self.timeout_s:.0f} s")
            try:
                return await self._ask(index, conversation, left)
            except ActorDiedError:
                logger.exception("server %d of the reward model is dead", index)
                self._dead.add(index)
            except RayActorError as error:
                logger.warning("server %d of the reward model is away: %s", index, str(error).splitlines()[0])
                away.add(index)

    async def _ask(self, index: int, conversation: Conversation, timeout_s: float) -> float:
        from ray.exceptions import RayTaskError

        self._load[index] += 1
        try:
            call = self._servers[index].score.remote(conversation, timeout_s)
            return float(await ray_await(call, what="the reward model", timeout_s=timeout_s + GRACE_S))
        except RayTaskError as error:
            if isinstance(error.cause, RlflowError):
                raise error.cause from None  # its text without the server's traceback is a reason
            raise RolloutError(f"server {index} of the reward model failed: {error.cause}") from error
        finally:
            self._load[index] -= 1
