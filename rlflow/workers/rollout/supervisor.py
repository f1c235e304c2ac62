"""Replicas that die or hang are noticed, replaced, and serve again only with the weights of the moment.

                    no sign of life                started             weights, one-token probe
       SERVING ─────────────────────> STARTING ──────────────> WAITING ─────────────────────────> SERVING
                                          │ budget used up
                                          └─────────────────> GONE; with nobody left: requests fail, naming it

Invariants
    - A replica is in the balancer only while it is SERVING: after a generate call of one token gave that token under
      the version that the run is at.
    - Every replica is asked for its status once a `heartbeat_s`, and at once when a client found its process gone.
      An answer that takes longer than `hang_timeout_s` counts as none.
    - What is given up is killed with all its processes, so that whoever waits for it gets an error now, and its devices
      and memory are free. Its requests are asked anew by their clients.
    - The trainer's weights are sent to a new replica only while they rest: at the next sync, or at once while the
      replicas serve (see `supervised_sync`).
    - All states change in the supervisor's own thread. Every change is an event of the journal.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from rlflow.config import SupervisorConfig
from rlflow.utils.errors import DeadlineError
from rlflow.utils.ray_utils import ray_await
from rlflow.workers.rollout.base import RolloutError
from rlflow.workers.rollout.replica import RolloutReplica
from rlflow.workers.rollout.vital_signs import first_line, probe, trouble

logger = logging.getLogger(__name__)

T = TypeVar("T")
EventSink = Callable[..., None]

_LONG_CALL_S = 30.0
_BALANCER_TIMEOUT_S = 60.0
_LOOK_AGAIN_S = 0.2


class ReplicaState(Enum):
    """What the supervisor knows of a replica."""

    SERVING = "serving"
    STARTING = "starting again"
    WAITING = "waiting for weights"
    GONE = "gone"


@dataclass
class Watched:
    """A replica under supervision."""

    replica: RolloutReplica
    state: ReplicaState = ReplicaState.WAITING
    restarts: int = 0
    cause: str = ""
    since: float = field(default_factory=time.monotonic)
    lost_at: float | None = None
    reported: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def enter(self, state: ReplicaState) -> None:
        """Change the state, and note when."""
        self.state, self.since = state, time.monotonic()


class ReplicaSupervisor:
    """See the module. Build it, `start` it, `shutdown` it; it works in a thread of its own.

    Args:
        settings: `rollout.supervisor`: deadlines and budget.
        replicas: launched replicas.
        balancer: the balancer actor of their clients.

    Attributes:
        on_event: called as `on_event(name, **facts)` for every event, in the supervisor's thread. What happens before
            it is set is told with the first event after.
        deliver: called for a replica that waits for weights; brings them if it can (`SupervisedSync` sets it).
    """

    def __init__(self, settings: SupervisorConfig, replicas: list[RolloutReplica], balancer: Any) -> None:
        self.settings = settings
        self.watched = [Watched(replica) for replica in replicas]
        self.deliver: Callable[[Watched], Coroutine[Any, Any, bool]] | None = None
        self.on_event: EventSink | None = None
        self._balancer = balancer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._halt = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="replica-supervisor", daemon=True)
        self._started = threading.Event()
        self._untold: list[tuple[str, dict[str, Any]]] = []
        self._losses: list[int] = []  # ranks, in the order in which they were lost
        self._tasks: set[asyncio.Task[Any]] = set()
        self._counts = {"lost": 0, "restarts": 0, "downtime_s": 0.0}

    # --- any thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch; the replicas have been launched."""
        self._thread.start()
        if not self._started.wait(timeout=self.settings.start_timeout_s):
            raise DeadlineError("The supervisor of the rollout replicas did not start.")

    def shutdown(self) -> None:
        """Watch no more; replicas are left as they are."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._halt.set)
            self._thread.join(timeout=_LONG_CALL_S)

    @property
    def running(self) -> bool:
        """Whether somebody watches."""
        return self._started.is_set() and self._thread.is_alive()

    @property
    def losses(self) -> int:
        """Replicas lost since the start; a mark for `examine`."""
        return len(self._losses)

    async def in_its_thread(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine in the supervisor's thread and await its result here."""
        if self._loop is None or not self.running:
            work.close()
            raise RolloutError("The supervisor of the rollout replicas is not running; its log says why it ended.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except TimeoutError as error:
            if future.done() and not future.cancelled():
                raise  # the work's own
            raise DeadlineError(
                f"The supervisor of the rollout replicas did not answer in {timeout_s:.0f} s."
            ) from error

    def wake(self) -> None:
        """Something changed for replicas that wait: look again now."""
        if self._loop is not None and self.running:
            for watched in self.watched:
                self._loop.call_soon_threadsafe(watched.wake.set)

    def describe(self) -> list[str]:
        """A line for every replica that does not serve."""
        now = time.monotonic()
        return [
            f"rollout replica {w.replica.replica_rank} is {w.state.value} for {now - w.since:.0f} s "
            f"({w.cause or 'new'}; restart {w.restarts} of {self.settings.max_restarts})"
            for w in self.watched
            if w.state is not ReplicaState.SERVING
        ]

    def take_metrics(self) -> dict[str, float]:
        """What happened since the last call, and how many serve now."""
        counts, self._counts = self._counts, {"lost": 0, "restarts": 0, "downtime_s": 0.0}
        serving = sum(w.state is ReplicaState.SERVING for w in self.watched)
        return {
            "supervisor/replicas_serving": float(serving),
            "supervisor/replicas_lost": float(counts["lost"]),
            "supervisor/restarts": float(counts["restarts"]),
            "supervisor/downtime_s": counts["downtime_s"],
        }

    def nobody_left(self) -> RolloutError | None:
        """The error that ends the run when every replica is gone."""
        if any(w.state is not ReplicaState.GONE for w in self.watched):
            return None
        return RolloutError(f"No rollout replica is left: {self._why_gone()}. {_ADVICE}")

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception:
            logger.exception("the supervisor of the rollout replicas ended; replicas are not watched any more")
            raise

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._ask(self._balancer.set_hope.remote(True))
        noting = (asyncio.wait_for(w.replica.note_processes(), self.settings.hang_timeout_s) for w in self.watched)
        for w, error in zip(self.watched, await asyncio.gather(*noting, return_exceptions=True), strict=True):
            if error is not None:  # dead or hung already: its first look will find that
                logger.warning("rollout replica %d does not answer: %s", w.replica.replica_rank, first_line(error))
                w.wake.set()
        self._started.set()
        works: list[Callable[[], Coroutine[Any, Any, None]]] = [partial(self._watch, w) for w in self.watched]
        tasks = [asyncio.create_task(self._keep_going(work)) for work in [*works, self._listen]]
        await self._halt.wait()
        for task in (*tasks, *self._tasks):
            task.cancel()
        await asyncio.gather(*tasks, *self._tasks, return_exceptions=True)

    async def _keep_going(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                return await work()
            except Exception:  # what went wrong with one replica must not leave the others unwatched
                logger.exception("watching the rollout replicas failed; going on")
                await asyncio.sleep(self.settings.heartbeat_s)

    async def _watch(self, w: Watched) -> None:
        while w.state is not ReplicaState.GONE:
            await _until(w.wake, self.settings.heartbeat_s)
            w.wake.clear()
            if w.state not in (ReplicaState.SERVING, ReplicaState.WAITING):
                continue
            reported, w.reported = w.reported, False
            if cause := await self._trouble(w):
                await self._replace(w, cause)
            elif reported and w.state is ReplicaState.SERVING:  # its client lost the connection, not the server
                await self._ask(self._balancer.add_servers.remote({w.replica.server_id: w.replica.server_handle}))
            if w.state is ReplicaState.WAITING and self.deliver is not None:
                await self._deliver(w)

    async def _deliver(self, w: Watched) -> None:
        """Bring weights, and look meanwhile as often as else: a server that hangs must not hold up the trainer."""
        assert self.deliver is not None
        delivery = asyncio.create_task(self.deliver(w))
        cause: str | None = None
        try:
            while not (await asyncio.wait({delivery}, timeout=self.settings.heartbeat_s))[0]:
                cause = cause or await self._trouble(w)
                if cause and not delivery.done():
                    await w.replica.kill()  # the delivery's calls to it fail now
            await delivery
            if cause:
                await self._replace(w, cause)
        except Exception as error:  # noqa: BLE001 - whatever it was, this replica has no proven weights
            cause = cause or await self._trouble(w) or f"{type(error).__name__}: {first_line(error)}"
            await self._replace(w, cause)
        finally:
            delivery.cancel()

    async def _listen(self) -> None:
        """Clients see a death first: their reports wake the watcher of that replica."""
        heard = 0
        while True:
            reports = await self._ask(self._balancer.wait_for_reports.remote(heard, _LONG_CALL_S))
            heard += len(reports)
            for w in self.watched:
                if w.replica.server_id in reports:
                    w.reported = True
                    w.wake.set()

    async def _ask(self, ref: Any) -> Any:
        return await ray_await(ref, what="the rollout load balancer", timeout_s=_LONG_CALL_S + _BALANCER_TIMEOUT_S)

    async def _trouble(self, w: Watched) -> str | None:
        """Why the replica cannot serve; None when it gives a sign of life, or is being replaced already."""
        life = w.replica.life
        cause = await trouble(list(w.replica.servers), self.settings.hang_timeout_s)
        replaced = w.replica.life != life or w.state in (ReplicaState.STARTING, ReplicaState.GONE)
        return None if replaced else cause

    async def _replace(self, w: Watched, cause: str) -> None:
        """Evict, kill, start again as often as the budget allows."""
        if w.state in (ReplicaState.STARTING, ReplicaState.GONE):
            return
        w.lost_at = w.lost_at or time.monotonic()
        while True:
            try:
                await self._evict(w, cause)
            except Exception:  # it has left its state: only a start, or the end of the budget, brings it out of there
                logger.exception("rollout replica %d was not evicted properly", w.replica.replica_rank)
            if w.restarts >= self.settings.max_restarts:
                await self._give_up(w)
                return
            w.restarts += 1
            self._event("replica_restarting", w, restart=w.restarts, max_restarts=self.settings.max_restarts)
            try:
                async with asyncio.timeout(self.settings.start_timeout_s):
                    await w.replica.relaunch()
                    await w.replica.note_processes()
                    await w.replica.sleep()  # at rest, as a weight update wants it
            except Exception as error:  # noqa: BLE001 - any failure to start is answered by the next try, or the budget
                cause = f"did not start: {type(error).__name__}: {first_line(error)}"
                continue
            break
        w.enter(ReplicaState.WAITING)
        self._counts["restarts"] += 1
        self._event("replica_restarted", w, restart=w.restarts)
        w.wake.set()

    async def _evict(self, w: Watched, cause: str) -> None:
        w.enter(ReplicaState.STARTING)
        w.cause = cause
        server_id, rank = w.replica.server_id, w.replica.replica_rank
        self._losses.append(rank)
        self._counts["lost"] += 1
        requests = await self._ask(self._balancer.get_inflight_count.remote(server_id))
        await self._ask(self._balancer.remove_servers.remote([server_id]))
        logger.warning("rollout replica %d is lost (%s); %d requests are asked anew", rank, cause, requests)
        self._event("replica_lost", w, cause=cause, requests=requests, pids=list(w.replica.pids))
        await w.replica.kill()

    async def _give_up(self, w: Watched) -> None:
        w.enter(ReplicaState.GONE)
        self._event("replica_gone", w, cause=w.cause, restarts=w.restarts)
        if self.nobody_left() is not None:
            await self._ask(self._balancer.set_hope.remote(False, self._why_gone()))

    def _why_gone(self) -> str:
        parts = [f"replica {w.replica.replica_rank} is {w.cause}" for w in self.watched]
        return f"{'; '.join(parts)}; rollout.supervisor.max_restarts={self.settings.max_restarts} is used up"

    def _event(self, name: str, w: Watched, **facts: Any) -> None:
        self._untold.append((name, {"replica": w.replica.replica_rank, **facts}))
        if self.on_event is None:
            return  # the journal opens later
        told, self._untold = self._untold, []
        try:
            for event, its_facts in told:
                self.on_event(event, **its_facts)
        except Exception:  # a full disk must not end the supervision
            logger.exception("the event %s of rollout replica %d is not recorded", name, w.replica.replica_rank)

    # --- called in the thread by `in_its_thread` --------------------------------------------------------------------

    async def examine(self, mark: int) -> list[int]:
        """Ranks lost since `losses` was `mark`, after a look at every replica that should be there."""
        there = [w for w in self.watched if w.state in (ReplicaState.SERVING, ReplicaState.WAITING)]
        causes = await asyncio.gather(*(self._trouble(w) for w in there))
        for w, cause in zip(there, causes, strict=True):
            if cause and w.state in (ReplicaState.SERVING, ReplicaState.WAITING):
                self._in_background(self._replace(w, cause))
        await asyncio.sleep(0)  # each has left its state now
        return self._losses[mark:]

    async def admit(self, ranks: set[int], version: int) -> None:
        """These replicas got weights: let those that wait serve, once they have proved it."""
        new = [w for w in self.watched if w.replica.replica_rank in ranks and w.state is ReplicaState.WAITING]
        await asyncio.gather(*(self._admit(w, version) for w in new))

    async def _admit(self, w: Watched, version: int) -> None:
        life = w.replica.life
        try:
            await self.prove(w, version)
        except Exception as error:  # noqa: BLE001 - it does not serve, whatever the reason
            cause = await self._trouble(w) or f"not ready: {first_line(error)}"
            if w.replica.life == life:
                self._in_background(self._replace(w, cause))

    async def prove(self, w: Watched, version: int) -> None:
        """One token under `version`, then into the balancer.

        Raises:
            RolloutError, DeadlineError: it cannot, or it was lost meanwhile.
        """
        server_id, server = w.replica.server_id, w.replica.server_handle
        await probe(w.replica, version, self.settings.ready_timeout_s)
        if w.state is ReplicaState.WAITING and w.replica.server_id == server_id:
            await self._ask(self._balancer.add_servers.remote({server_id: server}))
        if w.state is not ReplicaState.WAITING or w.replica.server_id != server_id:
            raise RolloutError(f"Rollout replica {w.replica.replica_rank} was lost while it proved its weights.")
        down = 0.0 if w.lost_at is None else time.monotonic() - w.lost_at
        w.lost_at = None
        w.enter(ReplicaState.SERVING)
        self._counts["downtime_s"] += down
        self._event("replica_serving", w, version=version, restarts=w.restarts, pids=list(w.replica.pids), down_s=down)

    async def some_waiting(self, timeout_s: float) -> bool:
        """Wait until a replica is there that could get weights; False when none will come."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if any(w.state in (ReplicaState.SERVING, ReplicaState.WAITING) for w in self.watched):
                return True
            if self.nobody_left() is not None:
                return False
            await asyncio.sleep(_LOOK_AGAIN_S)
        return False

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


_ADVICE = (
    "The servers' logs in the Ray session directory say why they ended (out of memory?). More tries: "
    "rollout.supervisor.max_restarts."
)


async def _until(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
