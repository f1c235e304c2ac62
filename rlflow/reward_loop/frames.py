"""Length-prefixed frames on the pipes between a reward worker and its scorer processes.

A frame is a 4-byte big-endian length and that many bytes. Towards the child the bytes are a pickle: the worker wrote it
itself, and a row keeps its types. Towards the worker they are JSON, because what a scorer returns depends on model text
and on users' code, and reading it must not be able to run anything.
"""

from __future__ import annotations

import json
import os
from typing import Any

HEADER_BYTES = 4
MAX_REPLY_BYTES = 1 << 20


def frame(payload: bytes) -> bytes:
    """The payload with its length in front."""
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


def encode_reply(reply: dict[str, Any]) -> bytes:
    """A reply as ASCII JSON (lone surrogates become escapes); `ValueError` for NaN, infinity and oversized replies."""
    payload = json.dumps(reply, allow_nan=False).encode("ascii")
    if len(payload) > MAX_REPLY_BYTES:
        raise ValueError(f"the result is {len(payload)} bytes long, at most {MAX_REPLY_BYTES} are taken")
    return payload


def read_exactly(fd: int, n: int) -> bytes | None:
    """`n` bytes from a blocking pipe; None at its end."""
    parts = []
    while n:
        part = os.read(fd, min(n, 1 << 20))
        if not part:
            return None
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def read_frame(fd: int) -> bytes | None:
    """The payload of the next frame; None at the end of the pipe."""
    header = read_exactly(fd, HEADER_BYTES)
    return None if header is None else read_exactly(fd, int.from_bytes(header, "big"))


def write_all(fd: int, data: bytes) -> None:
    """Write everything to a blocking pipe."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
