"""Running an operation of the process's client, which attaches to the table at the first call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from rlflow.transfer_queue.errors import QueueUnavailableError

if TYPE_CHECKING:
    from rlflow.transfer_queue.client import TransferQueueClient

T = TypeVar("T")


async def run(operation: Callable[[TransferQueueClient], Awaitable[T]]) -> T:
    """Run an operation on the caller's event loop; a client whose table is gone is dropped."""
    from rlflow.transfer_queue import runtime

    # Attaching waits for Ray, so it leaves the event loop.
    client = runtime.current_client()
    if client is None:
        client = await asyncio.to_thread(runtime.attached_client)
    try:
        return await operation(client)
    except QueueUnavailableError:
        runtime.forget_if_gone(client)
        raise


def run_sync(operation: Callable[[TransferQueueClient], Awaitable[T]]) -> T:
    """Run an operation on the process's own event loop while the calling thread blocks."""
    from rlflow.transfer_queue import runtime

    return runtime.loop_thread().run(run(operation))


def run_direct(operation: Callable[[TransferQueueClient], Coroutine[Any, Any, T]]) -> T:
    """`run_sync` without an event loop, for operations that wait for nothing but the table."""
    from rlflow.transfer_queue import runtime

    return runtime.run_direct(operation)
