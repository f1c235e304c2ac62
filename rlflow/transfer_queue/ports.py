"""Calling the controller and the storage units: with a deadline, and with errors that say who did not answer."""

from __future__ import annotations

import asyncio
import copy
from typing import Any, Protocol

from rlflow.transfer_queue.errors import QueueUnavailableError
from rlflow.utils.ray_utils import ray_await


class Port(Protocol):
    """One remote object."""

    gone: bool  # it is known to have ended, for good

    async def call(self, method: str, *args: Any, extra_s: float = 0.0) -> Any:
        """Call a method and await its result.

        Args:
            method: name of the method.
            *args: its arguments.
            extra_s: seconds the call may wait by its own meaning, added to the deadline.

        Raises:
            DeadlineError: no answer in time.
            QueueUnavailableError: the other side is gone.
            Exception: what the method raised.
        """


class RayPort:
    """A Ray actor.

    Args:
        handle: the actor handle.
        name: who it is, for messages.
        timeout_s: deadline of a call.
    """

    def __init__(self, handle: Any, name: str, timeout_s: float) -> None:
        self.handle = handle
        self.gone = False
        self._name = name
        self._timeout_s = timeout_s

    async def call(self, method: str, *args: Any, extra_s: float = 0.0) -> Any:
        """See `Port.call`."""
        from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

        try:
            ref = getattr(self.handle, method).remote(*args)
            return await ray_await(ref, what=f"{method} of the {self._name}", timeout_s=self._timeout_s + extra_s)
        except RayTaskError as error:
            # Ray wraps what the method raised and puts the remote traceback into its message; we want the original.
            raise error.cause from None
        except RayActorError as error:
            self.gone = isinstance(error, ActorDiedError)
            raise QueueUnavailableError(
                f"the {self._name} {'is gone' if self.gone else 'cannot be reached'} (during {method}): "
                f"{str(error).splitlines()[0]} It lives as long as the "
                "process that called transfer_queue.init first, so that process has closed it or died; see its log"
            ) from error

    def notify(self, method: str, *args: Any) -> None:
        """Call a method without waiting for it."""
        getattr(self.handle, method).remote(*args)


class LocalPort:
    """An object of this process whose coroutines run on one event loop, whichever loop the caller is on."""

    gone = False

    def __init__(self, target: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._target = target
        self._loop = loop

    async def call(self, method: str, *args: Any, extra_s: float = 0.0) -> Any:
        """See `Port.call`; a local call cannot lose its other side."""
        # Copies on both ways, as between processes: a caller that changes its tags must not change the table's.
        coroutine = getattr(self._target, method)(*copy.deepcopy(args))
        if asyncio.get_running_loop() is not self._loop:
            coroutine = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))
        result = await coroutine
        return result if method == "session" else copy.deepcopy(result)
