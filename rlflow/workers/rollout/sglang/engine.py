"""`sglang.Engine` in this process, as coroutines with errors of ours.

    server (asyncio) ──> Engine's tokenizer manager (same loop) ──zmq──> scheduler processes, one a rank

Invariants
    - The engine is built in a thread that lives as long as the engine: its processes ask the kernel to be killed when
      the thread that started them ends, so they die with this process, however it ends.
    - SGLang returns failures of its control calls, `(False, message)`; here they are exceptions.
    - When a process of the engine dies, every call under way and every later one raises `RolloutError` and says so.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rlflow.checkpoint_engine.segments import Segment
from rlflow.utils.errors import DeadlineError, WeightSyncError
from rlflow.workers.rollout.base import RolloutError
from rlflow.workers.rollout.sglang.arguments import EngineArguments
from rlflow.workers.rollout.sglang.weight_loader import LOADER, REPLY_BYTES

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONTROL_TIMEOUT_S = 120.0
# One bucket, or a checksum of all parameters; the sync has deadlines of its own.
_LOAD_TIMEOUT_S = 600.0
_FLUSH_PAUSE_S = 0.02


class SGLangEngine:
    """See the module. Methods are called on one event loop, the one that called `start`."""

    def __init__(self, arguments: EngineArguments) -> None:
        self.arguments = arguments
        self._engine: Any = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sglang-engine")
        self._failure: RolloutError | None = None
        self._death: asyncio.Future[None] | None = None  # done when the engine has died
        self._stopping = threading.Event()
        self._replies: list[Segment] = []
        self._updating = False
        self._released: set[str] = set()

    async def start(self) -> None:
        """Start the processes and load the model; minutes on a cold machine.

        Raises:
            RolloutError: the engine did not start; the scheduler's own log says why.
        """
        loop = asyncio.get_running_loop()
        self._death = loop.create_future()
        _ignore_sigquit()
        try:
            self._engine = await loop.run_in_executor(self._thread, self._build)
        except Exception as error:
            raise RolloutError(
                f"SGLang did not start: {type(error).__name__}: {error}. Arguments: {self.arguments.kwargs}. The "
                "reason is in the output of this server's process (Ray's log folder)."
            ) from error
        watch = threading.Thread(target=self._watch, args=(loop,), name="sglang-watch", daemon=True)
        watch.start()

    @property
    def failure(self) -> str | None:
        """Why the engine is gone; None while it lives."""
        return str(self._failure) if self._failure else None

    @property
    def released(self) -> frozenset[str]:
        """Memory that is given back ("kv_cache", "weights")."""
        return frozenset(self._released)

    def processes(self) -> list[int]:
        """Process ids of the schedulers."""
        return list(self._engine.get_all_child_pids())

    # --- requests ---------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: list[int], sampling: dict[str, Any], rid: str, **options: Any
    ) -> dict[str, Any]:
        """One request to its end, without a deadline: SGLang's dict of "output_ids" and "meta_info".

        Args:
            options: of `GenerateReqInput`.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(input_ids=prompt_ids, sampling_params=sampling, rid=rid, **options)
        return await self._alive(anext(self._manager.generate_request(request, None)), None)

    def abort(self, rid: str) -> None:
        """Ask for the end of a request; it then returns what it has."""
        self._manager.abort_request(rid=rid)

    async def flush(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Forget all keys and values, once nothing runs.

        A request that has returned may still be in the scheduler's last batch, so this is also the proof of rest that
        SGLang's memory and weight calls need: they end the scheduler process when it is not idle.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if (await self._alive(self._manager.flush_cache())).success:
                return
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"SGLang did not come to rest within {timeout_s:.0f} s; its cache cannot be flushed."
                )
            await asyncio.sleep(_FLUSH_PAUSE_S)

    # --- memory -----------------------------------------------------------------------------------------------------

    async def release(self, tags: tuple[str, ...]) -> None:
        """Give memory back. Flushes first; nothing may run."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self.flush()
        if wanted := [tag for tag in tags if tag not in self._released]:
            await self._alive(
                self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=wanted), None)
            )
            self._released.update(wanted)

    async def resume(self, tags: tuple[str, ...] | None = None) -> None:
        """Take memory back that was given; None = all of it."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if wanted := [tag for tag in self._released if tags is None or tag in tags]:
            await self._alive(self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=wanted), None))
            self._released.difference_update(wanted)

    # --- weights ----------------------------------------------------------------------------------------------------

    async def begin_update(self) -> None:
        """Open an update; one that was left open is closed. `WeightSyncError` when SGLang refuses."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        await self.end_update()
        await self.resume(("weights",))
        await self.flush()
        _require(await self._alive(self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None)))
        self._updating = True
        await self.tell({"op": "forget"})

    async def tell(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a message to `weight_loader.load` in every scheduler process; their answers, by rank.

        Raises:
            WeightSyncError: no update is open, or a rank answered with an error.
        """
        import torch
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        while len(self._replies) < self.arguments.tp_size:
            self._replies.append(Segment(f"rlflow-sglang-reply-{len(self._replies)}"))
        payloads = []
        for reply in self._replies:
            reply.view(REPLY_BYTES)[:8].zero_()
            body = bytearray(json.dumps({**message, "reply": reply.path}).encode())
            # SGLang's pickle-based serialiser, from this process to the ones it started itself.
            payloads.append(
                MultiprocessingSerializer.serialize([("message", torch.frombuffer(body, dtype=torch.uint8))])
            )
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=LOADER, flush_cache=False
        )
        _require(await self._alive(self._manager.update_weights_from_tensor(request, None), _LOAD_TIMEOUT_S))
        answers = [_read(reply) for reply in self._replies]
        if errors := {answer["error"]: answer["tensors"] for answer in answers if "error" in answer}:
            tensors = {name for names in errors.values() for name in names}
            raise WeightSyncError("; ".join(errors), tensors=tuple(sorted(tensors)))
        return answers

    async def end_update(self) -> None:
        """Close the update that is open, if one is."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        if self._updating:
            self._updating = False
            _require(await self._alive(self._manager.end_weight_update(EndWeightUpdateReqInput(), None)))

    async def label(self, version: int) -> None:
        """Name the present weights in the answers of requests."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        await self._alive(self._manager.update_weight_version(request))

    # --- life -------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the processes. May be called twice, and from any thread."""
        self._stopping.set()
        engine, self._engine = self._engine, None
        if engine is not None:
            self._thread.submit(engine.shutdown).result(timeout=CONTROL_TIMEOUT_S)
            self._thread.shutdown(wait=False)
            multiprocessing.active_children()  # takes note of those that ended: no zombies are left
        for reply in self._replies:
            reply.close()
        self._replies = []

    @property
    def _manager(self) -> Any:
        if self._failure is not None:
            raise RolloutError(str(self._failure))
        if self._engine is None:
            raise RolloutError("The SGLang engine was shut down, or is not started yet.")
        return self._engine.tokenizer_manager

    def _build(self) -> Any:
        from sglang.srt.entrypoints.engine import Engine

        from rlflow.workers.rollout.sglang.scheduler import run_scheduler

        class SeededEngine(Engine):
            run_scheduler_process_func = staticmethod(run_scheduler)

        asyncio.set_event_loop(asyncio.new_event_loop())  # the engine wants one for its synchronous calls
        engine = (SeededEngine if self.arguments.on_cpu else Engine)(**self.arguments.kwargs)
        # It would end this whole process when a child dies; `_watch` fails the requests by name instead.
        engine.tokenizer_manager._subprocess_watchdog.stop()
        return engine

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for the death of a child process."""
        children: dict[Any, Any] = {child.sentinel: child for child in multiprocessing.active_children()}
        while not self._stopping.is_set():
            if gone := multiprocessing.connection.wait(list(children), timeout=1.0):
                break
        else:
            return
        if self._stopping.is_set():
            return
        child = children[gone[0]]
        child.join(1.0)
        self._failure = RolloutError(
            f"The SGLang engine of process {os.getpid()} died: its process {child.pid} ended with exit code "
            f"{child.exitcode} (a negative number is a signal). Its own words are in the log of this server."
        )
        logger.error("%s", self._failure)
        assert self._death is not None
        loop.call_soon_threadsafe(self._death.set_result, None)

    async def _alive(self, call: Coroutine[Any, Any, T], timeout_s: float | None = CONTROL_TIMEOUT_S) -> T:
        """`call`, unless the engine dies meanwhile, or is silent for too long. None: the caller has a deadline."""
        assert self._death is not None
        task = asyncio.ensure_future(call)
        either: set[asyncio.Future[Any]] = {task, self._death}
        try:
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return await task
            if self._failure is not None:
                raise RolloutError(str(self._failure))
            raise DeadlineError(f"SGLang's scheduler did not answer within {timeout_s or 0:.0f} s; it may hang.")
        finally:
            task.cancel()


def _ignore_sigquit() -> None:
    """A scheduler that fails sends it to this process, which would end without a word to its callers.

    By the C library: Python lets only the main thread do it, and an actor's coroutines run in another.
    """
    ignore = 1  # SIG_IGN
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(signal.SIGQUIT, ignore)


def _require(result: Any) -> None:
    """SGLang's control calls return (success, message, ...)."""
    success, message = result[0], result[1]
    if not success:
        raise WeightSyncError(f"SGLang refused a weight update: {message}")


def _read(reply: Segment) -> dict[str, Any]:
    memory = reply.view(REPLY_BYTES)
    size = int.from_bytes(bytes(memory[:8].tolist()), "little")
    if not size:
        raise WeightSyncError("A scheduler process of SGLang did not answer a weight message.")
    answer: dict[str, Any] = json.loads(bytes(memory[8 : 8 + size].tolist()))
    return answer
