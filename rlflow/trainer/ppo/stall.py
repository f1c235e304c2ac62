"""Who is alive while sampling makes no progress: the lines of a stall report.

Each part of the run is asked for a sign of life, all at once and with one short deadline; when it last gave one is
remembered. Silent and dead parts come first: they are the likely owners of what does not end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

ASK_S = 3.0
MAX_SESSIONS = 5


class Pulse:
    """Asks and remembers.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._born = clock()
        self._heard: dict[str, float] = {}

    def lines(self, agent_loop_manager: Any, runtime: Any) -> list[str]:
        """Lines about agent workers, rollout servers, reward workers and running sessions.

        Raises:
            RlflowError: no agent-loop worker is left.
        """
        troubles: list[str] = []
        healthy: list[str] = []
        sessions: list[str] = []
        status = getattr(agent_loop_manager, "status", None)
        if status is not None:
            report = status()
            for worker in report["workers"]:
                name = f"agent worker {worker['index']}"
                if worker["problem"]:
                    troubles.append(f"{name}: {worker['problem']}; {self._last(name)}")
                else:
                    self._heard[name] = self._clock()
            sessions = [self._session(item) for item in report["running"]]
        servers = {
            _server_name(replica, nth): server
            for replica in getattr(getattr(runtime, "server_manager", None), "rollout_replicas", [])
            for nth, server in enumerate(replica.servers)
        }
        scorers = {
            f"reward worker {nth}": handle
            for nth, handle in enumerate(getattr(getattr(runtime, "reward_manager", None), "workers", []))
        }
        for name, answer in self._ask({**servers, **scorers}).items():
            if isinstance(answer, dict):
                if name in servers:
                    healthy.append(f"{name} answers: {_engine(answer)}")
            else:
                troubles.append(f"{name} {answer}; {self._last(name)}")
        hidden = len(sessions) - MAX_SESSIONS
        more = [f"... and {hidden} more sessions"] if hidden > 0 else []
        supervisor = getattr(runtime, "supervisor", None)
        replicas = [] if supervisor is None else supervisor.describe()
        return [*troubles, *replicas, *healthy, *sessions[:MAX_SESSIONS], *more]

    def _ask(self, handles: dict[str, Any]) -> dict[str, Any]:
        """Status of each actor, or words for why there is none."""
        import ray
        from ray.exceptions import RayError

        from rlflow.utils.ray_utils import ray_get

        refs = {name: handle.status.remote() for name, handle in handles.items()}
        if not refs:
            return {}
        ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=ASK_S)
        answers: dict[str, Any] = {}
        for name, ref in refs.items():
            if ref not in ready:
                answers[name] = f"gave no sign of life within {ASK_S:g} s"
                continue
            try:
                answers[name] = ray_get(ref, what=f"status of {name}", timeout_s=ASK_S)
                self._heard[name] = self._clock()
            except RayError as error:
                answers[name] = f"is dead ({str(error).strip().splitlines()[0]})"
        return answers

    def _last(self, name: str) -> str:
        heard = self._heard.get(name)
        if heard is None:
            return f"not heard since {self._clock() - self._born:.0f} s"
        return f"last heartbeat {self._clock() - heard:.0f} s ago"

    def _session(self, item: dict[str, Any]) -> str:
        owner = f"agent worker {item['worker']}"
        return (
            f"running: {item['uid']}, session {item['session']}, in {item['phase']!r} for {item['phase_s']:.0f} s "
            f"(age {item['age_s']:.0f} s, {item['tokens']} tokens so far); owner: {owner}, {self._last(owner)}"
        )


def _server_name(replica: Any, nth: int) -> str:
    pids = getattr(replica, "pids", [])
    pid = f" (pid {pids[nth]})" if nth < len(pids) else ""
    return f"rollout replica {replica.replica_rank}{pid}"


def _engine(status: dict[str, Any]) -> str:
    states = [name for name in ("paused", "asleep") if status.get(name)]
    facts = [f"{status.get('running', '?')} requests running, {status.get('waiting', '?')} waiting", *states]
    return ", ".join(facts) + (f", failed: {status['failure']}" if status.get("failure") else "")
