"""Calling the controller and the storage units: with a deadline, and with errors that say who did not answer.

The client is written once, as coroutines. A port comes in two forms: one suspends the coroutine until the answer is
there, the other (`blocking()`) blocks the thread. A coroutine all of whose ports are blocking never suspends, so
`drive` runs it in the calling thread, without an event loop and without a hop to another thread.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Protocol, TypeVar

from rlflow.transfer_queue.errors import QueueUnavailableError
from rlflow.utils.ray_utils import ray_await, ray_get

T = TypeVar("T")

# Work on more bytes than this leaves the event loop, which may drive hundreds of agent sessions.
_OFFLOAD_BYTES = 4 << 20


class Port(Protocol):
    """One remote object."""

    is_blocking: bool

    @property
    def gone(self) -> bool:
        """It is known to have ended, for good."""

    def start(self, method: str, *args: Any) -> Any:
        """Call a method without waiting; the result is for `finish` of this port or its other form."""

    async def finish(self, started: Any, method: str, extra_s: float = 0.0) -> Any:
        """The result of a call; see `call`."""

    def call(self, method: str, *args: Any, extra_s: float = 0.0) -> Awaitable[Any]:
        """Call a method, at once; await its result.

        Args:
            method: name of the method.
            *args: its arguments.
            extra_s: seconds the call may wait by its own meaning, added to the deadline.

        Raises:
            DeadlineError: no answer in time.
            QueueUnavailableError: the other side is gone.
            Exception: what the method raised.
        """

    def blocking(self) -> Port:
        """The form of this port whose answers block the thread."""


class _Reply(Awaitable[Any]):
    """A call under way. Unlike a coroutine it may be left alone."""

    def __init__(self, port: Port, method: str, args: tuple[Any, ...], extra_s: float) -> None:
        self._started = port.start(method, *args)
        self._port, self._method, self._extra_s = port, method, extra_s

    def __await__(self) -> Generator[Any, None, Any]:
        return self._port.finish(self._started, self._method, self._extra_s).__await__()


class _Life:
    gone = False


class RayPort:
    """A Ray actor.

    Args:
        handle: the actor handle.
        name: who it is, for messages.
        timeout_s: deadline of a call.
    """

    def __init__(self, handle: Any, name: str, timeout_s: float) -> None:
        self.handle = handle
        self.is_blocking = False
        self.group: str | None = None  # concurrency group of the actor
        self._name = name
        self._timeout_s = timeout_s
        self._life = _Life()

    @property
    def gone(self) -> bool:
        """See `Port.gone`."""
        return self._life.gone

    def blocking(self) -> RayPort:
        """See `Port.blocking`."""
        port = copy.copy(self)
        port.is_blocking = True
        return port

    def call(self, method: str, *args: Any, extra_s: float = 0.0) -> Awaitable[Any]:
        """See `Port.call`."""
        return _Reply(self, method, args, extra_s)

    def start(self, method: str, *args: Any) -> Any:
        """See `Port.start`."""
        function = getattr(self.handle, method)
        return (function.options(concurrency_group=self.group) if self.group else function).remote(*args)

    async def finish(self, started: Any, method: str, extra_s: float = 0.0) -> Any:
        """See `Port.finish`."""
        from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

        what, timeout_s = f"{method} of the {self._name}", self._timeout_s + extra_s
        try:
            if self.is_blocking:
                return ray_get(started, what=what, timeout_s=timeout_s)
            return await ray_await(started, what=what, timeout_s=timeout_s)
        except RayTaskError as error:
            # Ray wraps what the method raised and puts the remote traceback into its message; we want the original.
            raise error.cause from None
        except RayActorError as error:
            self._life.gone = isinstance(error, ActorDiedError)
            raise QueueUnavailableError(
                f"the {self._name} {'is gone' if self.gone else 'cannot be reached'} (during {method}): "
                f"{str(error).splitlines()[0]} It lives as long as the "
                "process that called transfer_queue.init first, so that process has closed it or died; see its log"
            ) from error


class LocalPort:
    """An object of this process whose coroutines run on one event loop, whichever loop the caller is on."""

    gone = False

    def __init__(self, target: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.is_blocking = False
        self._target = target
        self._loop = loop

    def blocking(self) -> LocalPort:
        """See `Port.blocking`."""
        port = copy.copy(self)
        port.is_blocking = True
        return port

    def call(self, method: str, *args: Any, extra_s: float = 0.0) -> Awaitable[Any]:
        """See `Port.call`; a local call cannot lose its other side."""
        return _Reply(self, method, args, extra_s)

    def start(self, method: str, *args: Any) -> Any:
        """See `Port.start`."""
        # Copies on both ways, as between processes: a caller that changes its tags must not change the table's.
        coroutine = getattr(self._target, method)(*copy.deepcopy(args))
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def finish(self, started: Any, method: str, extra_s: float = 0.0) -> Any:
        """See `Port.finish`."""
        result = started.result() if self.is_blocking else await asyncio.wrap_future(started)
        return result if method == "session" else copy.deepcopy(result)


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that only awaits blocking ports, in this thread."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise RuntimeError(f"{coroutine!r} awaits something else than a blocking port")


async def offload(port: Port, count: int, function: Callable[..., T], *args: Any) -> T:
    """Call a function that works on `count` bytes; beside the event loop when there is one and they are many."""
    if port.is_blocking or count <= _OFFLOAD_BYTES:
        return function(*args)
    return await asyncio.to_thread(function, *args)
