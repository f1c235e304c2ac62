"""Notes when the parts of a run compute: a module for `actor_rollout_ref.model.external_lib`, used by `step.py`.

Each process of the job imports it and appends one line for every piece of work to `$RLFLOW_STEP_PROBE/{pid}.jsonl`:

    {"kind": "generate", "start": unix seconds, "end": ..., ...}

    generate      one step of the rollout engine's thread, prefill included       (server process)
    log-probs     a forward over the batch                                        (trainer process)
    update        the mini-batch updates over the batch                           (trainer process)
    weight sync   sending, loading and proving the weights                        (trainer process, the server answers)
    reward        one score, as the agent loop waits for it                       (agent-loop process)
    arrival       a session's rows have been put into the TransferQueue           (agent-loop process)

A line costs some ten microseconds. Nothing else of the job changes; a name that the package does not have any more is
an error, so that no figure goes missing silently.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

FOLDER = "RLFLOW_STEP_PROBE"


class _Lines:
    """The file of this process, opened by its first line: a forked child would otherwise write into its parent's."""

    def __init__(self) -> None:
        self._pid = 0
        self._file: Any = None
        self._lock = threading.Lock()

    def add(self, kind: str, start: float, **facts: Any) -> None:
        """One piece of work that ends now."""
        line = json.dumps({"kind": kind, "start": start, "end": time.time(), **facts}) + "\n"
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                self._file = open(os.path.join(os.environ[FOLDER], f"{self._pid}.jsonl"), "a", encoding="utf-8")
            self._file.write(line)
            self._file.flush()


_lines = _Lines()


def timed(owner: Any, name: str, kind: str) -> None:
    """Note every call of a method of a class, or of a function of a module."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.time()
        try:
            return method(*args, **kwargs)
        finally:
            _lines.add(kind, start)

    setattr(owner, name, call)


def timed_async(owner: Any, name: str, kind: str, facts: Callable[..., dict[str, Any]] | None = None) -> None:
    """The same for coroutines, until their end; `facts` of the arguments are added to the line."""
    method = getattr(owner, name)

    @functools.wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Any:
        start = time.time()
        try:
            return await method(*args, **kwargs)
        finally:
            _lines.add(kind, start, **(facts(*args, **kwargs) if facts else {}))

    setattr(owner, name, call)


def timed_engine_steps(cls: type) -> None:
    """Note every step of the rollout engine, with the tokens it processed."""
    step = cls._step  # type: ignore[attr-defined]
    names = ("prefill_tokens", "decode_tokens", "prefill_s", "decode_s")

    @functools.wraps(step)
    def call(self: Any) -> None:
        before = [getattr(self.counters, name) for name in names]
        start = time.time()
        try:
            step(self)
        finally:
            done = {n: getattr(self.counters, n) - b for n, b in zip(names, before, strict=True)}
            _lines.add("generate", start, **done)

    cls._step = call  # type: ignore[attr-defined]


def install() -> None:
    """Wrap what this process has loaded; importing more would change its start-up time."""
    if "rlflow.workers.rollout.hf.engine" in sys.modules:
        from rlflow.workers.rollout.hf.engine import HFEngine

        timed_engine_steps(HFEngine)
    if "rlflow.workers.training_worker" in sys.modules and "rlflow.workers.engine.fsdp.model" in sys.modules:
        from rlflow.checkpoint_engine.shared_memory import SharedMemorySender
        from rlflow.workers.training_worker import TrainingWorker

        timed(TrainingWorker, "infer_batch", "log-probs")
        timed(TrainingWorker, "train_mini_batch", "update")
        timed_async(
            SharedMemorySender, "send", "weight sync", lambda self, params, server, version, *_: {"version": version}
        )
    if "rlflow.agent_loop.worker" in sys.modules:
        import rlflow.transfer_queue as tq
        from rlflow.agent_loop.scoring import RewardClient

        timed_async(RewardClient, "score", "reward")
        # The only batch put of an agent-loop worker: the rows of a session that ended.
        timed_async(tq, "async_kv_batch_put", "arrival")


if os.environ.get(FOLDER):
    install()
