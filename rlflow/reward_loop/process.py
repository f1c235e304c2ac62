"""The worker's side of one scorer process (`rlflow.reward_loop.child`).

Invariants
    - Every call ends: with a result, with `InvalidRewardError`, or with `ScorerLostError` when the process was lost for
      a reason that may not be this call's.
    - After `kill` no process of the scorer's group is left, and the object is of no further use.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import pickle
import signal
import sys
import textwrap
from typing import Any

from rlflow.reward_loop.frames import HEADER_BYTES, MAX_REPLY_BYTES, frame
from rlflow.reward_loop.output import ScorerOutput
from rlflow.reward_loop.result import InvalidRewardError
from rlflow.reward_loop.scorer import ScorerSpec
from rlflow.utils.errors import ConfigError, RlflowError

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 60.0
# A coroutine scorer is cancelled inside its process at the deadline; only one that blocks its loop needs this long.
ASYNC_GRACE_S = 1.0
EXIT_TIMEOUT_S = 1.0
# What a process wrote just before its end is read this long.
LAST_WORDS_S = 0.3


class ScorerLostError(RlflowError):
    """The process ended or was killed while several calls ran in it; this call may be innocent."""


class ScorerProcess:
    """One child. Made by `spawn`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ids = itertools.count()
        self._reader: asyncio.Task[None] | None = None
        self._lost: str | None = None
        self._output = ScorerOutput(f"scorer {process.pid}")
        self._output_reader = asyncio.create_task(self._read_output())
        self.concurrent = False

    @classmethod
    async def spawn(cls, spec: ScorerSpec, load_timeout_s: float = LOAD_TIMEOUT_S) -> ScorerProcess:
        """Start a process and let it load the function.

        Raises:
            ConfigError: the function cannot be loaded, or not within `load_timeout_s`.
        """
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        env.setdefault("OMP_NUM_THREADS", "1")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rlflow.reward_loop.child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        child = cls(process)
        try:
            async with asyncio.timeout(load_timeout_s):
                child._send(spec)
                hello = await child._read()
        except TimeoutError as error:
            await child.kill("it did not start")
            raise ConfigError(
                f"importing {spec.label} took over {load_timeout_s:g} s (reward.load_timeout_s). Work at the top of "
                f"the file runs in every scorer process: move it into a function, or raise the limit.{child._said()}"
            ) from error
        except (EOFError, OSError) as error:
            reason = await child._end()
            raise ConfigError(f"the process that imports {spec.label} {reason}{child._said()}") from error
        except BaseException:
            await child.kill("its start was cancelled")
            raise
        if "error" in hello:
            await child.kill("it could not load the function")
            raise ConfigError(str(hello["error"]).removeprefix("ConfigError: "))
        child.concurrent = bool(hello.get("async"))
        child._reader = asyncio.create_task(child._read_replies())
        return child

    @property
    def alive(self) -> bool:
        """Whether calls can be made."""
        return self._lost is None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Process id, also of its group."""
        return self._process.pid

    async def call(self, keywords: dict[str, Any], timeout_s: float) -> Any:
        """Run the function once.

        Returns:
            What it returned, as `normalise_result` says it.

        Raises:
            InvalidRewardError: it raised, gave no score, ended the process, or took over `timeout_s`.
            ScorerLostError: the process was lost while other calls ran in it too.
        """
        if not self.alive:
            raise ScorerLostError(self._lost or "the scorer process is gone")
        call_id = next(self._ids)
        try:
            payload = pickle.dumps((call_id, keywords, timeout_s))
        except Exception as error:  # noqa: BLE001 -- pickling runs the row's own code; whatever it raises is the reason
            raise InvalidRewardError(f"the row cannot be sent to the scorer: {error}") from error
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = future
        try:
            async with asyncio.timeout(timeout_s + (ASYNC_GRACE_S if self.concurrent else 0.0)):
                self._process.stdin.write(frame(payload))  # type: ignore[union-attr]
                with contextlib.suppress(ConnectionError):  # a lost process is told through the future
                    await self._process.stdin.drain()  # type: ignore[union-attr]
                reply = await future
        except TimeoutError as error:
            self._pending.pop(call_id, None)
            shared = bool(self._pending)
            await self.kill("a call in it hung")
            if shared:  # whoever blocked the event loop kept this call from being served or cancelled too
                raise ScorerLostError("the scorer process did not answer and was killed") from error
            raise InvalidRewardError(f"no score within {timeout_s:g} s; the scorer process was killed") from error
        except asyncio.CancelledError:
            # A plain function goes on after its caller left; only the kill makes the process free again.
            if not self.concurrent:
                self._pending.pop(call_id, None)
                await self.kill("a call in it was cancelled")
            raise
        finally:
            self._pending.pop(call_id, None)
        if "invalid" in reply:
            raise InvalidRewardError(str(reply["invalid"]))
        return reply["result"]

    async def kill(self, why: str) -> None:
        """End the process, its guard and everything in its group; other calls in it get `ScorerLostError`."""
        self._lose(f"the scorer process was killed because {why}")
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()
        self._kill_group()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await self._process.wait()
        await self._end_output()

    async def _read_output(self) -> None:
        stream = self._process.stderr
        assert stream is not None
        while data := await stream.read(1 << 16):
            self._output.feed(data)

    async def _end_output(self) -> None:
        """Take in what the process wrote last; one that left its group may hold the pipe for ever."""
        await asyncio.wait({self._output_reader}, timeout=LAST_WORDS_S)
        self._output_reader.cancel()
        self._output.close()

    def _said(self) -> str:
        tail = self._output.tail()
        return f"\n    its last output:\n{textwrap.indent(tail, '    | ')}" if tail else ""

    def _send(self, message: Any) -> None:
        self._process.stdin.write(frame(pickle.dumps(message)))  # type: ignore[union-attr]

    async def _read(self) -> dict[str, Any]:
        """The next reply; `EOFError` at the end of the pipe, `ValueError` for anything that is no reply."""
        stdout = self._process.stdout
        assert stdout is not None
        length = int.from_bytes(await stdout.readexactly(HEADER_BYTES), "big")
        if length > MAX_REPLY_BYTES:
            raise ValueError(f"a reply of {length} bytes")
        reply = json.loads(await stdout.readexactly(length), parse_constant=_refuse_constant)
        if not isinstance(reply, dict):
            raise ValueError(f"a reply that is a {type(reply).__name__}")
        return reply

    async def _read_replies(self) -> None:
        try:
            while True:
                reply = await self._read()
                future = self._pending.pop(reply.get("id", -1), None)
                if future is not None and not future.done():
                    future.set_result(reply)
        except (EOFError, OSError):
            reason = await self._end()
            last = self._output.tail().rpartition("\n")[2]
            reason += f"; it last wrote: {last}" if last else ""
        except (ValueError, TypeError, RecursionError) as error:
            reason = f"sent no valid reply: {error}"
        self._lose(f"the scorer process {reason}", by_a_call=True)
        await self.kill("it was lost")

    def _lose(self, reason: str, by_a_call: bool = False) -> None:
        """Fail what is pending. When a call caused the loss, and was alone in the process, it is that one."""
        self._lost = self._lost or reason
        pending, self._pending = list(self._pending.values()), {}
        for future in pending:
            if not future.done():
                error = InvalidRewardError(reason) if by_a_call and len(pending) == 1 else ScorerLostError(reason)
                future.set_exception(error)

    async def _end(self) -> str:
        """How the process ended, after its pipe did; it is killed when it lingers."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await self._process.wait()
        code = self._process.returncode  # known even while a child of the scorer still holds its stderr
        self._kill_group()
        await self._end_output()
        if code is None:
            return "closed its pipe"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def _kill_group(self) -> None:
        # The group lives at least as long as the guard in it, so its number cannot have passed to someone else.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"the constant {name}")
