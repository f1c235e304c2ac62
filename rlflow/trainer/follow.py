"""The launcher's wait: show what the controller reports, notice when it reports nothing any more.

Invariant: the wait ends with the run, with the controller's death, or `silence_s` after its last sign of life.
"""

from __future__ import annotations

import time
from typing import Any

from rlflow.trainer.interrupt import SignalGuard
from rlflow.utils.errors import DeadlineError, RlflowError
from rlflow.utils.ray_utils import ray_get
from rlflow.utils.redact import redact_text

POLL_S = 10.0
ANSWER_S = 20.0


def follow(runner: Any, result: Any, guard: SignalGuard | None, silence_s: float) -> Any:
    """The value of `result`, the ref of the runner's `run`; its events are shown meanwhile.

    Args:
        runner: the actor. One that has no `events(after, timeout_s)` gives no sign of life until it ends.
        result: what its `run` gave.
        guard: knows of signals.
        silence_s: seconds that `events` may stay unanswered.

    Raises:
        RlflowError: the run failed, its process died, or it fell silent.
    """
    from ray.exceptions import RayActorError, RayTaskError

    try:
        return _Follower(runner, result, guard, silence_s).follow()
    except RayTaskError as error:
        cause = error.cause if isinstance(getattr(error, "cause", None), RlflowError) else None
        if cause is not None:
            raise type(cause)(str(cause)) from error
        raise RlflowError(f"the run failed:\n{error}") from error
    except RayActorError as error:
        raise RlflowError(f"the controller process died: {error}") from error


class _Follower:
    def __init__(self, runner: Any, result: Any, guard: SignalGuard | None, silence_s: float) -> None:
        from rlflow.observe.live import LiveTable

        self._runner, self._result, self._guard, self._silence_s = runner, result, guard, silence_s
        self._table = LiveTable()
        self._last = 0
        self._heard = time.monotonic()
        self._where = "its process"
        self._step = 0

    def follow(self) -> Any:
        import ray

        has_events = hasattr(self._runner, "events")
        try:
            while not ray.wait([self._result], timeout=0 if has_events else POLL_S)[0]:
                if self._guard is not None:
                    self._guard.check()
                if has_events:
                    self._poll()
            value = ray_get(self._result, what="the result of the run", timeout_s=ANSWER_S)
            if has_events:
                self._show(ray_get(self._runner.events.remote(self._last, 0), what="last events", timeout_s=ANSWER_S))
            return value
        finally:
            self._table.close()

    def _poll(self) -> None:
        import ray

        poll = self._runner.events.remote(self._last, POLL_S)
        patience = min(ANSWER_S, self._silence_s)
        done, _ = ray.wait([poll, self._result], num_returns=1, timeout=patience)
        if poll in done:
            self._show(ray_get(poll, what="events", timeout_s=ANSWER_S))
        quiet = time.monotonic() - self._heard
        if not done and quiet >= self._silence_s:
            raise DeadlineError(
                f"Stalled {quiet:.0f} s: the controller does not answer (step {self._step}).\n"
                f"    owner: TaskRunner, {self._where}; last heartbeat {quiet:.0f} s ago\n"
                "    next:  the run ends (trainer.stall_timeout_s); is that process stopped, or out of memory?"
            )

    def _show(self, answer: tuple[int, list[dict[str, Any]]]) -> None:
        self._heard = time.monotonic()
        self._last, events = answer
        for event in events:
            if event["type"] == "stalled":
                raise DeadlineError(redact_text(event["text"]))
            if event["type"] == "controller":
                self._where = f"process {event['pid']} on {event['host']}"
            self._step = event.get("step", self._step)
            self._table.show(event)
