"""The one place where rlflow waits for Ray.

Invariant: no wait is without a deadline. A bare `ray.get` anywhere else is a defect.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any

from rlflow.utils.errors import DeadlineError, RlflowError

DEFAULT_TIMEOUT_S = 600.0


def no_answer(what: str, timeout_s: float) -> DeadlineError:
    """The error to raise when a process let a deadline pass."""
    return DeadlineError(
        f"Waited {timeout_s:.0f} s for {what} and got no answer. The process may be hung or overloaded; "
        "see its log under the Ray session directory, or raise the deadline that belongs to this call."
    )


def ray_get(refs: Any, *, what: str, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> Any:
    """Fetch one object ref or a list of them.

    Args:
        refs: a Ray object ref or a list of refs.
        what: what is awaited, for the error message ("init_model on 2 workers").
        timeout_s: seconds to wait; None only for a caller that holds a deadline of its own around the call.

    Raises:
        DeadlineError: when the time is over; the remote call keeps running.
        Exception: whatever the remote call raised, unchanged.
    """
    import ray
    from ray.exceptions import GetTimeoutError

    try:
        return ray.get(refs, timeout=timeout_s)
    except GetTimeoutError as error:
        raise no_answer(what, timeout_s or 0.0) from error


async def ray_await(ref: Awaitable[Any], *, what: str, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> Any:
    """`ray_get` for coroutines: awaits one ref without blocking the event loop."""
    try:
        return await asyncio.wait_for(_as_coroutine(ref), timeout=timeout_s)
    except RlflowError:
        raise  # a DeadlineError of the remote call itself is a TimeoutError too
    except TimeoutError as error:
        raise DeadlineError(
            f"Waited {timeout_s or 0:.0f} s for {what} and got no answer. The process may be hung or overloaded."
        ) from error


async def _as_coroutine(ref: Awaitable[Any]) -> Any:
    return await ref


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end from synchronous code, whether or not the thread already runs an event loop.

    With a running loop the coroutine gets a thread and a loop of its own; the calling thread blocks meanwhile.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def auto_await(function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """Let an `async def` be called from both worlds: a coroutine caller gets the coroutine, others the result.

    Called from a coroutine frame it returns the coroutine; from plain code it runs it to the end (in a helper thread
    when a loop is already running in this thread).
    """

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        caller = inspect.currentframe()
        caller = caller.f_back if caller is not None else None
        coroutine = function(*args, **kwargs)
        if caller is not None and caller.f_code.co_flags & inspect.CO_COROUTINE:
            return coroutine
        return run_coroutine(coroutine)

    return wrapper


def cluster_to_join(address: str | None = None, connect_timeout_s: float = 3.0) -> str:
    """Which Ray cluster a run joins: the named one, the one that `ray start` left on this machine, or "local" for a new
    one.

    `ray start` leaves its address in a file that outlives the cluster; Ray would try the dead address for minutes.

    Args:
        address: `ray_kwargs.ray_init.address`; None or "auto" where the user named none.
        connect_timeout_s: seconds until a cluster that does not answer counts as dead.

    Raises:
        RlflowError: a cluster that was asked for (`address`, RAY_ADDRESS) does not answer.
    """
    import os
    import socket

    from ray._private.utils import read_ray_address

    named = address if address and address != "auto" else os.environ.get("RAY_ADDRESS")
    if named and (named == "local" or "://" in named):
        return named
    found = named if named and named != "auto" else read_ray_address()
    if not found:
        if address == "auto" or named == "auto":
            raise RlflowError("ray_init.address=auto, but no Ray cluster runs here. Start one with `ray start --head`.")
        return "local"
    host, _, port = found.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=connect_timeout_s):
            return found
    except (OSError, ValueError) as error:
        if named or address == "auto":
            raise RlflowError(
                f"the Ray cluster at {found} does not answer: {error}. Check ray_kwargs.ray_init.address and "
                "RAY_ADDRESS, or leave both out to start Ray on this machine."
            ) from error
        return "local"
