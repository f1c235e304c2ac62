"""One session as the worker sees it: what it is doing, since when, and its view of the LLM client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any, TypeVar

from rlflow.agent_loop.settings import request_seed
from rlflow.utils.errors import DeadlineError

logger = logging.getLogger(__name__)

T = TypeVar("T")

CANCEL_GRACE_S = 5.0


def session_name(uid: str, session_id: int) -> str:
    """Name of one session of a prompt."""
    return f"{uid}_{session_id}"


@dataclass
class Session:
    """Progress of one session; the record that stall reports are made from.

    Fields:
        phase: what it does now ("template", "generate turn 2", "reward", "store").
        min_global_steps, max_global_steps: weight versions that served its calls; None before the first answer.
        abandoned: its deadline passed; it must not write any more.
        worker: name of the agent-loop worker it runs on.
    """

    uid: str
    session_id: int
    phase: str = "starting"
    started: float = field(default_factory=monotonic)
    phase_started: float = field(default_factory=monotonic)
    turns: int = 0
    tokens: int = 0
    stop_reason: str | None = None
    min_global_steps: int | None = None
    max_global_steps: int | None = None
    abandoned: bool = False
    worker: str = ""

    @property
    def name(self) -> str:
        """`{uid}_{session}`: the request id, and the front part of its rows' keys."""
        return session_name(self.uid, self.session_id)

    def enter(self, phase: str) -> None:
        """Note that a phase begins."""
        self.phase = phase
        self.phase_started = monotonic()

    def served(self, output: Any) -> None:
        """Note a finished generate call."""
        versions = output.extra_fields or {}
        step = versions.get("global_steps")
        first, last = versions.get("min_global_steps", step), versions.get("max_global_steps", step)
        if first is not None:
            self.min_global_steps = int(first) if self.min_global_steps is None else self.min_global_steps
        if last is not None:
            self.max_global_steps = int(last)
        self.tokens += len(output.token_ids)
        self.stop_reason = output.stop_reason
        self.enter("loop")

    def facts(self) -> dict[str, Any]:
        """Who ran it, and its unix seconds from start to now."""
        now = time()
        return {"worker": self.worker, "started": now - (monotonic() - self.started), "ended": now}

    def report(self) -> dict[str, Any]:
        """For stall reports; seconds."""
        now = monotonic()
        return {
            "uid": self.uid,
            "session": self.session_id,
            "phase": self.phase,
            "age_s": now - self.started,
            "phase_s": now - self.phase_started,
            "turns": self.turns,
            "tokens": self.tokens,
        }


class SessionClient:
    """The LLM client of one session: the shared client's `generate`, plus the seed of each turn and the bookkeeping.

    Every other attribute is the shared client's.

    Args:
        announced: the servers expect this session; tell them which of its requests each one is.
    """

    def __init__(self, client: Any, session: Session, seed: int, announced: bool = False) -> None:
        self._client = client
        self._session = session
        self._seed = seed
        self._announced = announced

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> Any:
        """Continue `prompt_ids`. The caller's dict and list are not changed; a seed in the dict wins."""
        session = self._session
        turn, session.turns = session.turns, session.turns + 1
        session.enter(f"generate turn {turn}")
        seed = request_seed(self._seed, session.uid, session.session_id, turn)
        place = {"session": session.name, "turn": turn} if self._announced else {}
        output = await self._client.generate(
            request_id,
            prompt_ids=list(prompt_ids),
            sampling_params={"seed": seed, **sampling_params},
            **place,
            **kwargs,
        )
        session.served(output)
        return output


async def within_deadline(work: Coroutine[Any, Any, T], session: Session, timeout_s: float) -> T:
    """Await a session's work for at most `timeout_s`.

    Raises:
        DeadlineError: names the session and the phase it hung in. The work is cancelled; work that ignores that is left
            behind with `session.abandoned` set.
    """
    task = asyncio.create_task(work, name=f"session {session.name}")
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if done:
        return task.result()
    phase, seconds = session.phase, monotonic() - session.phase_started
    session.abandoned = True
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
    if not done:
        logger.error("session %s ignores its cancellation in %r; it is left behind", session.name, phase)
    elif not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not complain
    raise DeadlineError(
        f"session {session.name} took over {timeout_s:g} s (rollout.agent.session_timeout_s); for the last "
        f"{seconds:.0f} s it was in {phase!r}"
    )
