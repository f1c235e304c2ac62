"""The process's connection to the table: creating it, attaching to it, leaving it.

Invariants
    - At most one client a process. A process that never called `init` attaches at its first call.
    - Only the process that created the table closes it; for any other process `close` is leaving.
    - A client of a table that is gone, or of an earlier Ray session, is dropped, so that the next call attaches anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from rlflow.transfer_queue.client import TransferQueueClient
from rlflow.transfer_queue.controller import CONTROLLER_NAME, TransferQueueController
from rlflow.transfer_queue.errors import (
    NotOwnerError,
    QueueArgumentError,
    QueueNotInitializedError,
    QueueUnavailableError,
)
from rlflow.transfer_queue.lane import controller_port
from rlflow.transfer_queue.ports import LocalPort, Port, RayPort, drive
from rlflow.transfer_queue.settings import default_namespace, merge_config, place_units, shown_config
from rlflow.transfer_queue.storage import storage_backend
from rlflow.utils.errors import DeadlineError
from rlflow.utils.ray_utils import ray_get

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CREATE_ATTEMPTS = 3
_KILL_TIMEOUT_S = 15.0
# Deadline of the first call to a controller: its process may still be starting on a busy machine.
_START_TIMEOUT_S = 120.0
# Sleeping watchers and puts that wait for room each take a place; the clear that wakes them must still find one.
_MAX_CONCURRENCY = 10_000


class LoopThread:
    """An event loop in a daemon thread; the sync forms run on it, from whatever thread they are called."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="transfer-queue", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end while the calling thread blocks. Its deadline is that of the calls in it."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(
                "a sync form of the table was called on the table's own event loop, where it would wait for itself; "
                "await the async_ form there"
            )
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


@dataclass
class _Connection:
    client: TransferQueueClient
    direct: TransferQueueClient  # its twin for the sync forms
    owner: bool
    pid: int
    session: str  # id of this process in Ray; a new ray.init gives a new one
    namespace: str


# _lock is held while connecting, which waits for remote answers; _state is only held to look and to set, so that the
# loop thread, on which those answers arrive, may take it.
_lock = threading.Lock()
_state = threading.Lock()
_connection: _Connection | None = None
_loop_thread: LoopThread | None = None


def loop_thread() -> LoopThread:
    """The process's private loop; a forked child starts its own."""
    global _loop_thread
    with _state:
        if _loop_thread is None or _loop_thread.pid != os.getpid():
            _loop_thread = LoopThread()
        return _loop_thread


def _ray_session() -> str:
    """Identifies this process's connection to Ray; empty without one."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    return ray.get_runtime_context().get_worker_id()


def _current() -> _Connection | None:
    connection = _connection
    if connection is None or connection.pid != os.getpid():
        return None
    if connection.session and connection.session != _ray_session():
        return None
    return connection


def current_client() -> TransferQueueClient | None:
    """The client in use; None before the first connection and after its end."""
    connection = _current()
    return None if connection is None else connection.client


def check_owner(action: str) -> None:
    """`NotOwnerError` (a RuntimeError) unless this process created the table."""
    connection = _current()
    if connection is None or not connection.owner:
        raise NotOwnerError(
            f"only the process that created the table (the first to call transfer_queue.init) may {action}; this "
            f"process {'is not connected to one' if connection is None else 'is attached to it'}. Call it there"
        )


def _living() -> _Connection | None:
    """The connection in use, if its controller still answers; a dead one is dropped."""
    connection = _current()
    if connection is None:
        return None
    try:
        loop_thread().run(_call(connection.client.controller, "session"))
    except QueueUnavailableError:
        forget_if_gone(connection.client)
    return _current()


def attached_client() -> TransferQueueClient:
    """The client in use, or a new one of the running table in this process's default namespace.

    Raises:
        QueueNotInitializedError: (an AssertionError) no table is running.
    """
    client = current_client()
    if client is not None:
        return client
    with _lock:
        client = current_client() or _attach(default_namespace(), strict=None)
    if client is None:
        raise QueueNotInitializedError(
            f"no table is running: there is no actor {CONTROLLER_NAME!r} in Ray namespace {default_namespace()!r}. "
            "Call rlflow.transfer_queue.init() in the process that owns the run; with a namespace of its own, every "
            "process must call init with it"
        )
    return client


def run_direct(operation: Callable[[TransferQueueClient], Coroutine[Any, Any, T]]) -> T:
    """Run an operation of the client that waits for nothing but the table, in the calling thread.

    A thread that runs an event loop cannot drive a second coroutine; there the private loop does it.
    """
    connection = _current()
    return run_on(attached_client() if connection is None else connection.client, operation)


def run_on(client: TransferQueueClient, operation: Callable[[TransferQueueClient], Coroutine[Any, Any, T]]) -> T:
    """`run_direct` on a client that the caller has."""
    try:
        if _runs_a_loop():
            return loop_thread().run(operation(client))
        connection = _connection
        known = connection is not None and connection.client is client
        return drive(operation(connection.direct if connection is not None and known else client.direct()))
    except QueueUnavailableError:
        forget_if_gone(client)
        raise


def _runs_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def forget_if_gone(client: TransferQueueClient) -> None:
    """Drop a client whose controller has ended.

    For any lesser trouble the client stays: the owner's holds the handle that keeps the table alive.
    """
    global _connection
    with _state:
        if client.controller.gone and _connection is not None and _connection.client is client:
            _connection = None


def leave(controller: Port) -> None:
    """Drop the process's client if it is one of this controller, unless the table lives as long as it: the owner's."""
    global _connection
    with _state:
        connection = _connection
        if connection is None or connection.owner or connection.client.controller is not controller:
            return
        _connection = None
    connection.client.disconnect()


def init(conf: Any, strict: bool | None) -> Any:
    """See `api.init`."""
    with _lock:
        config = merge_config(conf)
        connection = _living()
        if connection is not None:
            if conf is not None and config["namespace"] != connection.namespace:
                raise QueueArgumentError(
                    f"this process is attached to the table of namespace {connection.namespace!r} and cannot attach "
                    f"to {config['namespace']!r} too; close() first"
                )
            strict = connection.client.config["strict"] if strict is None else strict
            connection.client.strict = connection.direct.strict = strict
            return conf
        if config["backend"]["storage_backend"] == "Local":
            _create_local({**config, "strict": strict is not False})
            return _as_conf(config)
        for _ in range(_CREATE_ATTEMPTS):
            try:
                if _attach(config["namespace"], strict) is not None:
                    return conf
            except QueueUnavailableError:
                # The name still pointed to a table that is on its way out; by now it is free.
                logger.info("the table found in namespace %s was just closed; creating one", config["namespace"])
            if _create({**config, "strict": strict is not False}):
                return _as_conf(config)
        raise QueueUnavailableError(
            f"the actor {CONTROLLER_NAME!r} in namespace {config['namespace']!r} appears and disappears; another "
            "process creates and closes tables there. Give each run its own transfer_queue.namespace"
        )


def _as_conf(config: dict[str, Any]) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create(shown_config(config))


def _require_ray() -> Any:
    import ray

    if not ray.is_initialized():
        # A remote call would start a cluster of its own here, and the table would be in nobody's reach.
        raise QueueNotInitializedError(
            "this process is not connected to Ray; call ray.init() first, or use "
            "transfer_queue.backend.storage_backend=Local"
        )
    return ray


def _attach(namespace: str, strict: bool | None) -> TransferQueueClient | None:
    ray = _require_ray()
    try:
        handle = ray.get_actor(CONTROLLER_NAME, namespace=namespace)
    except ValueError:
        return None
    port = RayPort(handle, _controller_title(namespace), _START_TIMEOUT_S)
    return _connect(port, strict, owner=False, namespace=namespace)


def _controller_title(namespace: str) -> str:
    return f"TransferQueue controller (namespace {namespace!r})"


async def _call(port: Port, method: str) -> Any:
    return await port.call(method)


def _connect(port: Port, strict: bool | None, owner: bool, namespace: str) -> TransferQueueClient:
    """Make the process's client; `strict` None reads as the creator of the table does."""
    global _connection
    session = loop_thread().run(_call(port, "session"))
    config = session["config"]
    make_storage = storage_backend(config["backend"]["storage_backend"])[1]
    if isinstance(port, RayPort):
        port = controller_port(port.handle, _controller_title(namespace), config["rpc_timeout_s"], session["lane"])
    name = uuid.uuid4().hex[:16]
    storage = make_storage(session["endpoint"], config["rpc_timeout_s"], name)
    client = TransferQueueClient(port, storage, config, config["strict"] if strict is None else strict, name)
    ray_session = _ray_session() if isinstance(port, RayPort) else ""
    with _state:
        _connection = _Connection(client, client.direct(), owner, os.getpid(), ray_session, namespace)
    return client


def _create(config: dict[str, Any]) -> bool:
    """Create the table; False when another process was faster."""
    ray = _require_ray()
    options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": _MAX_CONCURRENCY}
    actor_class = ray.remote(**options)(_controller_class(config))
    placements = place_units(config, ray.nodes())
    try:
        handle = actor_class.options(name=CONTROLLER_NAME, namespace=config["namespace"]).remote(config, placements)
    except ValueError:
        return False
    logger.info("table created: %d storage unit(s), namespace %s", len(placements), config["namespace"])
    port = RayPort(handle, _controller_title(config["namespace"]), _START_TIMEOUT_S)
    _connect(port, None, owner=True, namespace=config["namespace"])
    return True


def _controller_class(config: dict[str, Any]) -> type[TransferQueueController]:
    if not config["metrics"]["enabled"]:
        return TransferQueueController
    from rlflow.transfer_queue.exporter import MeteredController

    return MeteredController


def _create_local(config: dict[str, Any]) -> None:
    controller = _controller_class(config)(config, [None])
    _connect(LocalPort(controller, loop_thread().loop), None, owner=True, namespace=config["namespace"])


def close() -> None:
    """See `api.close`."""
    global _connection
    with _lock:
        connection = _current()
        with _state:
            _connection = None
        if connection is None:
            return
        connection.client.disconnect()
        if not connection.owner:
            return
        client = connection.client
        if isinstance(client.controller, RayPort):
            _kill(client.controller.handle)
        elif client.config["metrics"]["enabled"]:
            loop_thread().run(_call(client.controller, "stop_metrics"))


def _kill(handle: Any) -> None:
    import ray
    from ray.exceptions import RayActorError

    # This call never returns by itself: it ends when the actor does, and then the actor's name is free for a new table.
    end = handle.watch.remote("", 0, 3600.0)
    ray.kill(handle)
    try:
        ray_get(end, what="the end of the killed TransferQueue controller", timeout_s=_KILL_TIMEOUT_S)
    except RayActorError:
        return
    except DeadlineError as error:
        logger.warning("%s", error)
