"""The client's side of the short way to a controller on the same node; see `lane_server`.

The sync forms use it when they run on the controller's node and it can be reached; everything else, and everybody else,
goes through Ray.

Invariants
    - A connection belongs to one thread of one process. Whoever has begun a call holds it, and hands it back only with
      the whole answer; so a late answer is never taken for that of another call.
    - A call is repeated through Ray only if its message has not wholly been sent; else it may have been carried out.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import Any

from rlflow.transfer_queue.errors import QueueUnavailableError
from rlflow.transfer_queue.lane_server import (
    ANSWER,
    ERROR,
    HEAD,
    HELLO,
    LARGEST_REPLY,
    LARGEST_REQUEST,
    METHODS,
    READ_BYTES,
    is_same_user,
    own_node,
    unpack_error,
)
from rlflow.transfer_queue.ports import RayPort
from rlflow.utils.errors import DeadlineError
from rlflow.utils.ray_utils import no_answer

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
# How long Ray may take to tell whether a controller that closed a connection is alive.
_PROBE_TIMEOUT_S = 10.0


class _Closed(Exception):
    """The other side closed the connection, or does not speak our language; what was sent may have been done."""


class _Connection:
    """A connection of one process; closed when nobody holds it."""

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_CONNECT_TIMEOUT_S)
        self._socket.connect(f"\0{name}")
        deadline = time.monotonic() + _CONNECT_TIMEOUT_S
        if not is_same_user(self._socket) or self._receive(len(HELLO), deadline) != HELLO:
            raise ConnectionError(f"{name} is no controller of this user")

    def __del__(self) -> None:
        if hasattr(self, "_socket"):
            self._socket.close()

    def send(self, number: int, message: bytes, timeout_s: float) -> None:
        """Raises OSError; then the other side has not got the whole message, and never will."""
        self._socket.settimeout(timeout_s)
        self._socket.sendall(HEAD.pack(len(message), number) + message)

    def answer(self, deadline: float) -> tuple[int, bytes]:
        """Status and message of the answer. Raises TimeoutError, _Closed."""
        size, status = HEAD.unpack(self._receive(HEAD.size, deadline))
        if size > LARGEST_REPLY or status not in (ANSWER, ERROR):
            raise _Closed(f"sent an answer of {size:,} bytes and status {status}, which it never does")
        return status, self._receive(size, deadline)

    def _receive(self, size: int, deadline: float) -> bytes:
        pieces, missing = [], size
        while missing:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            try:
                piece = self._socket.recv(min(missing, READ_BYTES))
            except ConnectionError as error:
                raise _Closed("closed the connection") from error
            if not piece:
                raise _Closed("closed the connection")
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)


class Lane:
    """A client's connections to one controller, one for each thread that calls.

    Args:
        name: of the controller's socket.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle = threading.local()
        self._usable = True

    def begin(self, method: str, args: tuple[Any, ...], timeout_s: float) -> _Connection | None:
        """Send a call; the connection will have its answer. None: it must go through Ray, nothing was done.

        Raises:
            TimeoutError: the message could not be sent in time.
        """
        if not self._usable or method not in METHODS or len(args[0]) > LARGEST_REQUEST:
            return None
        connection, self._idle.connection = getattr(self._idle, "connection", None), None
        try:
            # A forked child has its parent's connections; both would read each other's answers.
            if connection is None or connection.pid != os.getpid():
                connection = _Connection(self._name)
        except (OSError, _Closed) as error:
            self._drop(error)
            return None
        try:
            connection.send(METHODS.index(method), args[0], timeout_s)
        except TimeoutError:
            raise
        except OSError as error:
            self._drop(error)
            return None
        return connection

    def give_back(self, connection: _Connection) -> None:
        """The answer has been read to its end."""
        self._idle.connection = connection

    def _drop(self, error: Exception) -> None:
        self._usable = False
        logger.info("the controller's socket cannot be used (%r); its calls go through Ray", error)


class LanePort(RayPort):
    """A controller on this node: `RayPort`, whose blocking form takes the lane where it can.

    Args:
        handle: the actor handle.
        name: who it is, for messages.
        timeout_s: deadline of a call.
        lane: the lane to it.
    """

    def __init__(self, handle: Any, name: str, timeout_s: float, lane: Lane) -> None:
        super().__init__(handle, name, timeout_s)
        self._lane = lane

    def start(self, method: str, *args: Any) -> Any:
        """See `Port.start`."""
        if self.is_blocking:
            try:
                connection = self._lane.begin(method, args, self._timeout_s)
            except TimeoutError as error:
                raise no_answer(f"{method} of the {self._name}", self._timeout_s) from error
            if connection is not None:
                return connection
        return super().start(method, *args)

    async def finish(self, started: Any, method: str, extra_s: float = 0.0) -> Any:
        """See `Port.finish`."""
        if not isinstance(started, _Connection):
            return await super().finish(started, method, extra_s)
        timeout_s = self._timeout_s + extra_s
        try:
            status, data = started.answer(time.monotonic() + timeout_s)
        except TimeoutError as error:
            raise no_answer(f"{method} of the {self._name}", timeout_s) from error
        except _Closed as error:
            await self._check_alive(method)
            raise QueueUnavailableError(
                f"the {self._name} {error} during {method}, although it is alive, so that nobody knows whether it was "
                "done; see its log. The next calls open a new connection"
            ) from error
        self._lane.give_back(started)
        if status == ERROR:
            raise unpack_error(data)
        return data

    async def _check_alive(self, method: str) -> None:
        """Ask Ray. Raises QueueUnavailableError when the controller has ended, and then the port is `gone`."""
        try:
            await super().finish(super().start("session"), method, _PROBE_TIMEOUT_S - self._timeout_s)
        except DeadlineError as error:
            raise QueueUnavailableError(
                f"the {self._name} closed the connection during {method} and does not answer; see its log"
            ) from error


def controller_port(handle: Any, name: str, timeout_s: float, address: tuple[str, str] | None) -> RayPort:
    """The port to a controller whose lane has this address (`LaneServer.open`): with the lane if it is on this node."""
    if address is None or address[0] != own_node():
        return RayPort(handle, name, timeout_s)
    return LanePort(handle, name, timeout_s, Lane(address[1]))
