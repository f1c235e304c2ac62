"""The line of one event loop to the load balancer.

    lease ──┐                                  ┌──> server id
    lease ──┼── one call: lease_many([...]) ───┤
    lease ──┘   (later ones gather meanwhile)  └──> server id

A round trip to an actor costs more than choosing a server, so requests of one process share it. The handles of the
servers are kept here and sent again only after they changed.

Invariants
    - One `lease_many` is under way at a time; what is asked meanwhile travels with the next.
    - A lease that was asked for is given back exactly once, also when its asker was cancelled.
    - Without a server, asks wait on one long call that ends as soon as a server is there.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rlflow.utils.ray_utils import ray_await
from rlflow.workers.rollout.base import RolloutError
from rlflow.workers.rollout.load_balancer import Ask, Leases

BALANCER_TIMEOUT_S = 60.0
# A long call ends at the latest after this time and is made again, so that a dead balancer is noticed.
LONG_CALL_S = 30.0


class BalancerPort:
    """See the module. Used by one event loop.

    Args:
        balancer: the actor's handle.
    """

    def __init__(self, balancer: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self._balancer = balancer
        self._asks: list[tuple[Ask, asyncio.Future[tuple[str, Any]]]] = []
        self._returned: list[str] = []
        self._handles: dict[str, Any] = {}
        self._epoch = -1
        self._talk: asyncio.Task[None] | None = None

    async def lease(self, ask: Ask) -> tuple[str, Any]:
        """(server id, handle) for a request; waits while there is no server but hope of one.

        Raises:
            RolloutError: there is no server and none will come, or the balancer died.
        """
        future: asyncio.Future[tuple[str, Any]] = self.loop.create_future()
        self._asks.append((ask, future))
        if self._talk is None or self._talk.done():
            self._talk = self.loop.create_task(self._serve(), name="balancer port")
        try:
            return await future
        except asyncio.CancelledError:
            self.give_back(ask.lease_id)
            raise

    def give_back(self, lease_id: str) -> None:
        """The request ended. Does not wait; calls of one process arrive in order."""
        if not self._returned:
            self.loop.call_soon(self._send_returned)
        self._returned.append(lease_id)

    def _send_returned(self) -> None:
        lease_ids, self._returned = self._returned, []
        self._balancer.give_back.remote(lease_ids)

    async def _serve(self) -> None:
        await asyncio.sleep(0)  # let the other requests of this moment ask, too
        while self._asks:
            batch, self._asks = [(ask, future) for ask, future in self._asks if not future.done()], []
            try:
                await self._lease(batch)
            except asyncio.CancelledError:
                for _, future in batch:
                    future.cancel()
                raise
            except Exception as error:  # noqa: BLE001 - it belongs to those who wait for the answer
                self._asks = [item for item in self._asks if item not in batch]
                for _, future in batch:
                    if not future.done():
                        future.set_exception(_as_rollout_error(error))

    async def _lease(self, batch: list[tuple[Ask, asyncio.Future[tuple[str, Any]]]]) -> None:
        if not batch:
            return
        answer: Leases = await ray_await(
            self._balancer.lease_many.remote([ask for ask, _ in batch], self._epoch),
            what="the rollout load balancer",
            timeout_s=BALANCER_TIMEOUT_S,
        )
        if answer.handles is not None:
            self._handles, self._epoch = answer.handles, answer.epoch
        waiting = []
        for (ask, future), server_id in zip(batch, answer.servers, strict=True):
            if server_id is None and (answer.hope or ask.patient):
                waiting.append((ask, future))
            elif future.done():
                continue
            elif server_id is None:
                future.set_exception(no_server(ask.conversation, answer.reason))
            else:
                future.set_result((server_id, self._handles[server_id]))
        if waiting:
            self._asks[:0] = waiting
            await ray_await(
                self._balancer.wait_for_servers.remote(LONG_CALL_S, all(ask.patient for ask, _ in waiting)),
                what="the rollout load balancer",
                timeout_s=LONG_CALL_S + BALANCER_TIMEOUT_S,
            )


def no_server(request_id: str, reason: str) -> RolloutError:
    """Nobody can serve a request."""
    return RolloutError(
        f"Request {request_id} cannot be served: no rollout server is alive{reason and ', '}{reason}. Their logs in "
        "the Ray session directory say why they ended (out of memory?)."
    )


def _as_rollout_error(error: Exception) -> Exception:
    from ray.exceptions import RayActorError

    if not isinstance(error, RayActorError):
        return error
    wrapped = RolloutError("The rollout load balancer died; no request can be served.")
    wrapped.__cause__ = error
    return wrapped
