"""A shorter way to a controller on the same machine, for the two frequent calls: a Unix socket.

A call through Ray takes about a millisecond, most of it in Ray itself. The controller therefore also answers `put` and
`locate`, which are one message of bytes each way (`wire`), on a socket that its own event loop serves. This is its
side, and what both sides agree upon; the client's is in `lane`.

```
client -> server   length, number of the method, message
server -> client   hello | length, status, the method's answer or (class, message) of its error
```

Invariants
    - A connection carries one call at a time; a call that waits holds up nobody else's connection.
    - The address is in Linux's abstract namespace: it ends with the controller's process, and leaves no file. Both
      sides check that the other one is of the same user.
    - A client that breaks the rules loses its connection, and nobody else does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import sys
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack

from rlflow.transfer_queue import errors as table_errors
from rlflow.transfer_queue.errors import TransferQueueError
from rlflow.utils import errors as general_errors
from rlflow.utils.errors import RlflowError

logger = logging.getLogger(__name__)

METHODS = ("put_packed", "locate_packed")
HELLO = b"tq1\n"
# Larger messages go through Ray, whose shared memory pays by then; the server refuses them.
LARGEST_REQUEST = 4 << 20
LARGEST_REPLY = 1 << 30
READ_BYTES = 1 << 20
HEAD = struct.Struct("<IB")
ANSWER, ERROR = 0, 1

# Threads with a connection; further ones are sent to Ray before the controller runs out of file descriptors.
_MOST_CONNECTIONS = 512
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_KNOWN_ERRORS = {
    name: value
    for module in (general_errors, table_errors)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, RlflowError)
}


def own_node() -> str:
    """Id of the Ray node of this process."""
    import ray

    return ray.get_runtime_context().get_node_id()


def is_same_user(connection: Any) -> bool:
    """Whether the other side of a connection is of this process's user."""
    answer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(answer)[1] == os.getuid()


def pack_error(error: Exception) -> bytes:
    """An error for the way to the client; see `unpack_error`."""
    return msgpack.packb((type(error).__name__, str(error)), unicode_errors="surrogatepass")


def unpack_error(data: bytes) -> RlflowError:
    """The error of a call: of its own class, or a `TransferQueueError` that names a class that is none of ours."""
    name, message = msgpack.unpackb(data, unicode_errors="surrogatepass")
    if name in _KNOWN_ERRORS:
        return _KNOWN_ERRORS[name](message)
    return TransferQueueError(f"{name} in the TransferQueue controller: {message}; see its log")


class LaneServer:
    """Answers clients on the event loop on which `open` is called first.

    Args:
        target: has the coroutines `METHODS`, from bytes to bytes.
    """

    def __init__(self, target: Any) -> None:
        self._methods: list[Callable[[bytes], Awaitable[bytes]]] = [getattr(target, name) for name in METHODS]
        self._opening = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._name = f"rlflow-transfer-queue-{uuid.uuid4().hex}"
        self._connections = 0

    async def open(self) -> tuple[str, str] | None:
        """Begin to serve, once. Returns (node id, name in the abstract namespace); None where there is no such."""
        if sys.platform != "linux":
            return None
        async with self._opening:
            if self._server is None:
                listener = socket.socket(socket.AF_UNIX)
                listener.bind(f"\0{self._name}")
                self._server = await asyncio.start_unix_server(
                    self._serve, sock=listener, backlog=_MOST_CONNECTIONS, limit=READ_BYTES
                )
        return own_node(), self._name

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= _MOST_CONNECTIONS and is_same_user(writer.get_extra_info("socket")):
                writer.write(HELLO)
                await self._answer_all(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has ended, or hung up in the middle of a message
        finally:
            self._connections -= 1
            writer.close()

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            size, number = HEAD.unpack(await reader.readexactly(HEAD.size))
            if size > LARGEST_REQUEST or number >= len(self._methods):
                logger.warning("a connection is closed that asks for method %d with %d bytes", number, size)
                return
            status, data = await self._answer(number, await reader.readexactly(size))
            writer.write(HEAD.pack(len(data), status) + data)
            await writer.drain()

    async def _answer(self, number: int, message: bytes) -> tuple[int, bytes]:
        try:
            data = await self._methods[number](message)
        except Exception as error:  # noqa: BLE001 - belongs to the caller, as it does when Ray carries the call
            if type(error).__name__ not in _KNOWN_ERRORS:
                logger.exception("%s failed", METHODS[number])
            return ERROR, pack_error(error)
        if len(data) > LARGEST_REPLY:
            return ERROR, pack_error(
                TransferQueueError(f"the answer to {METHODS[number]} has {len(data):,} bytes; ask for fewer rows")
            )
        return ANSWER, data
