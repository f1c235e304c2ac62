"""`python -m rlflow.reward_loop.child`: the process in which reward functions run.

It can be killed at any moment, and that is how a deadline is kept: a scorer may loop for ever inside C code where no
signal handler or thread of the process gets a turn.

Invariants
    - A call is answered by a score or by a reason; the process ends only when told to (end of its stdin), when killed,
      or when the scorer ends it.
    - The pipes of the protocol belong to it alone: a scorer's `print` goes to stderr, which the worker reads as its
      output; its `input()` sees the end of a file.
    - Nothing outlives the worker: a forked guard waits for the worker's end of stdin to close, then kills the whole
      process group, that is this process and whatever a scorer started. (Not reached: a scorer's own daemons that
      leave the group by `setsid`.)

Protocol: the first frame is a `ScorerSpec`, answered by `{"ready", "async"}` or `{"error"}`. Then frames
`(id, keywords, timeout_s)` are answered by `{"id", "result"}` or `{"id", "invalid"}`. Plain functions run one at a
time in the main thread (so scorers may use signals); coroutine functions run concurrently, each with its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlflow.reward_loop.frames import encode_reply, frame, read_frame, write_all
from rlflow.reward_loop.result import InvalidRewardError, normalise_result, one_line
from rlflow.reward_loop.scorer import is_async, load_scorer

logger = logging.getLogger(__name__)

MAX_LOGGED_ERRORS = 5


class Channel:
    """The two ends of the protocol, taken away from stdin and stdout."""

    def __init__(self) -> None:
        self._in = os.dup(0)
        self._out = os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        _close_others({0, 1, 2, self._in, self._out})
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def start_guard(self) -> None:
        """Fork the process that ends the group when the worker is gone."""
        if os.fork():
            return
        # Else the worker would not see the ends of a crashed scorer's pipes.
        os.close(self._out)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        poll = select.poll()
        poll.register(self._in, 0)  # no events asked for: poll then returns for a hang-up only
        poll.poll()
        os.killpg(0, signal.SIGKILL)

    def receive(self) -> Any:
        """The next object from the worker; None at the end."""
        payload = read_frame(self._in)
        return None if payload is None else pickle.loads(payload)  # noqa: S301 -- written by the parent process

    def send(self, reply: dict[str, Any]) -> None:
        """One reply; a result that JSON cannot say becomes an invalid."""
        if os.getpid() != self._pid:
            os._exit(0)  # a process that the function forked came back here; only its parent answers
        try:
            payload = encode_reply(reply)
        except (ValueError, TypeError, RecursionError) as error:
            payload = encode_reply({"id": reply.get("id"), "invalid": one_line(f"the result cannot be sent: {error}")})
        with self._lock:
            write_all(self._out, frame(payload))


def _close_others(keep: set[int]) -> None:
    """Close what the worker's event loop let through (uvloop does): a copy of a pipe's end hides that the pipe ends."""
    limit = min(os.sysconf("SC_OPEN_MAX"), 1 << 16)
    known = Path("/proc/self/fd")
    for fd in map(int, os.listdir(known)) if known.is_dir() else range(limit):
        if fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)


class Scorer:
    """Runs the function and turns whatever it does into a reply."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._logged = 0

    def call(self, call_id: int, keywords: dict[str, Any]) -> dict[str, Any]:
        """Reply of one call of a plain function."""
        try:
            raw = self._function(**keywords)
            if asyncio.iscoroutine(raw):  # a plain function that hands on a coroutine
                raw = asyncio.run(raw)
            return {"id": call_id, "result": normalise_result(raw)}
        except BaseException as error:  # noqa: BLE001 -- user code: SystemExit, MemoryError, anything ends as a reason
            return self._failed(call_id, error)

    async def call_async(self, call_id: int, keywords: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Reply of one call of a coroutine function."""
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                raw = await self._function(**keywords)
            return {"id": call_id, "result": normalise_result(raw)}
        except BaseException as error:  # noqa: BLE001 -- user code: SystemExit, MemoryError, anything ends as a reason
            if isinstance(error, TimeoutError) and deadline.expired():
                return {"id": call_id, "invalid": f"no score within {timeout_s:g} s; the call was cancelled"}
            return self._failed(call_id, error)

    def _failed(self, call_id: int, error: BaseException) -> dict[str, Any]:
        if isinstance(error, InvalidRewardError):
            return {"id": call_id, "invalid": one_line(error)}
        if self._logged < MAX_LOGGED_ERRORS:
            self._logged += 1
            logger.error("the reward function raised", exc_info=error)
        return {"id": call_id, "invalid": one_line(f"the reward function raised {type(error).__name__}: {error}")}


def serve(channel: Channel, scorer: Scorer) -> None:
    """Answer calls one at a time until the worker closes the pipe."""
    while (request := channel.receive()) is not None:
        call_id, keywords, _ = request
        channel.send(scorer.call(call_id, keywords))


async def serve_async(channel: Channel, scorer: Scorer) -> None:
    """Answer calls concurrently until the worker closes the pipe."""
    loop = asyncio.get_running_loop()
    requests: asyncio.Queue[Any] = asyncio.Queue()

    def read() -> None:
        while True:
            request = channel.receive()
            loop.call_soon_threadsafe(requests.put_nowait, request)
            if request is None:
                return

    # A thread of its own: a scorer may fill the default executor of the loop.
    threading.Thread(target=read, name="requests", daemon=True).start()
    running: set[asyncio.Task[None]] = set()

    async def answer(request: Any) -> None:
        channel.send(await scorer.call_async(*request))

    while (request := await requests.get()) is not None:
        task = asyncio.create_task(answer(request))
        running.add(task)
        task.add_done_callback(running.discard)


def main() -> None:
    """Serve until the end of stdin."""
    channel = Channel()
    channel.start_guard()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="reward scorer %(process)d: %(message)s")
    spec = channel.receive()
    if spec is None:
        return
    try:
        function = load_scorer(spec)
    except BaseException as error:  # noqa: BLE001 -- importing user code: whatever it raises is the answer
        channel.send({"error": f"{type(error).__name__}: {error}"[:4000]})
        return
    concurrent = is_async(function)
    channel.send({"ready": True, "async": concurrent})
    scorer = Scorer(function)
    if concurrent:
        asyncio.run(serve_async(channel, scorer))
    else:
        serve(channel, scorer)
    os.killpg(0, signal.SIGKILL)  # the guard and whatever a scorer left behind


if __name__ == "__main__":
    main()
