"""The engine's thread: steps while there are requests, jobs of other threads between two steps, else sleep.

Invariants
    - What a caller changes it changes under `_condition`, and tells the thread; the thread decides under it too.
    - An exception in a step ends the thread and reaches every caller, present and future. One in a job belongs to
      whoever asked for it.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch

from rlflow.workers.rollout.base import RolloutError

logger = logging.getLogger(__name__)
T = TypeVar("T")
JOIN_TIMEOUT_S = 60.0


class EngineLoop(ABC):
    """See the module. A subclass calls `_start` when it is ready."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._jobs: deque[tuple[Callable[[], Any], Future[Any], bool]] = deque()
        self._stepping = self._stopped = False
        self._failure: RolloutError | None = None
        self._thread = threading.Thread(target=self._run, name="hf-engine", daemon=True)

    # ---- what a subclass says (all under the condition but `_step`) ----------------------------------------------

    @abstractmethod
    def _settle(self) -> None:
        """Between two steps: end what has to end."""

    @abstractmethod
    def _has_work(self) -> bool:
        """Whether there is a step to make."""

    @abstractmethod
    def _step(self) -> None:
        """One step, without the condition."""

    @abstractmethod
    def _wake_at(self) -> float:
        """When to settle again although nothing happens; `time.monotonic` seconds, or infinity."""

    @abstractmethod
    def _check_rest(self) -> None:
        """Raise unless nothing computes, and nothing will before this is undone."""

    @abstractmethod
    def _forget_all(self, error: RolloutError) -> None:
        """The thread has ended: everyone who waits for a request gets the error."""

    # ---- callers -------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Stop the thread; requests that are left fail."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()
        self._thread.join(timeout=JOIN_TIMEOUT_S)
        self._end_all(RolloutError("The rollout engine was shut down."))

    def _post(self, job: Callable[[], T], *, at_rest: bool = True) -> Future[T]:
        """Let the thread run a job between two steps; `at_rest`: only while the engine is paused or asleep."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        with self._condition:
            self._check_alive()
            if at_rest:
                self._check_rest()
            self._jobs.append((job, future, at_rest))
            self._condition.notify_all()
        return future

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RolloutError(str(self._failure))
        if self._stopped:
            raise RolloutError("The rollout engine was shut down.")

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while (work := self._next_work()) is not None:
                    work()
        except BaseException as error:  # noqa: BLE001 - whatever ends this thread must reach those who wait for it
            logger.exception("the rollout engine died")
            failure = RolloutError(f"The rollout engine died of {type(error).__name__}: {error}")
            failure.__cause__ = error
            with self._condition:
                self._failure = failure
            self._end_all(failure)

    def _next_work(self) -> Callable[[], None] | None:
        """Wait until there is something to do; None at shutdown."""
        with self._condition:
            while not self._stopped:
                self._stepping = False
                self._settle()
                self._condition.notify_all()
                if self._jobs:
                    self._stepping = True
                    return partial(self._run_job, *self._jobs.popleft())
                if self._has_work():
                    self._stepping = True
                    return self._step
                wait = self._wake_at() - time.monotonic()
                self._condition.wait(None if wait == float("inf") else max(wait, 0.001))
            self._stepping = False
            return None

    def _run_job(self, job: Callable[[], Any], future: Future[Any], at_rest: bool) -> None:
        try:
            with self._condition:
                if at_rest:
                    self._check_rest()  # it may have been resumed since
            result = job()
        except Exception as error:  # noqa: BLE001 - it belongs to the caller; the engine itself is sound
            future.set_exception(error)
        else:
            future.set_result(result)

    def _end_all(self, error: RolloutError) -> None:
        with self._condition:
            self._forget_all(error)
            for _, future, _ in self._jobs:
                future.set_exception(error)
            self._jobs.clear()
            self._stepping = False
            self._condition.notify_all()
