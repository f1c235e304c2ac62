"""Spreads prompts over agent-loop workers and knows which of them are running where.

Invariants
    - `generate_sequences` returns when the prompts are handed over, not when they are done.
    - A prompt goes to the worker with the fewest active sessions.
    - With `rollout.full_determinism` the rollout servers know the sessions of a batch, in its order, before a worker
      does. A prompt that starts again is announced again: its requests join where they can, so that a run in which a
      worker died goes on, but need not repeat bit for bit.
    - A prompt whose worker died before finishing it is given to another one; this is noticed whenever the workers are
      asked (`generate_sequences`, `status`).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from rlflow.agent_loop.session import session_name
from rlflow.agent_loop.settings import TRAIN, VAL, AgentLoopSettings
from rlflow.agent_loop.worker import AgentLoopWorkerTQ
from rlflow.utils.errors import ContractError, DeadlineError, RlflowError
from rlflow.utils.ray_utils import ray_get

if TYPE_CHECKING:
    from tensordict import TensorDict

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
SUBMIT_TIMEOUT_S = 60.0
REPORT_TIMEOUT_S = 10.0
RESTART_TIMEOUT_S = 120.0
RESTART_PAUSE_S = 1.0
MAX_RESTARTS = 3
MAX_CONCURRENT_CALLS = 1000
BATCH_OPTIONS = ("global_steps", "validate")
_DONE = ("finished", "failure")


@dataclass
class _Placed:
    row: dict[str, Any]
    global_steps: int
    validate: bool


@dataclass
class _Worker:
    """One actor, what was given to it, and its latest heartbeat."""

    handle: Any
    life: str | None = None
    placed: dict[str, _Placed] = field(default_factory=dict)
    report: dict[str, Any] | None = None
    problem: str | None = None  # why it gets no prompts now
    load: int = 0


class AgentLoopManagerTQ:
    """Owner of the agent-loop workers of a run. Make it with `create`.

    Args:
        config: the whole resolved config.
        llm_client: client of the rollout servers; a copy goes to each worker.
        teacher_client: kept for distillation; must be None.
        reward_loop_worker_handles: `RewardLoopManager.reward_loop_worker_handles`.
    """

    agent_loop_workers_class: type = AgentLoopWorkerTQ

    def __init__(
        self,
        config: Any,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: Sequence[Any] | None = None,
    ) -> None:
        import ray
        from ray import cloudpickle

        self._settings = AgentLoopSettings.from_config(config)
        self._client = llm_client
        n_workers = self._settings.rollout.agent.num_workers
        actor: Any = ray.remote(_actor_class(self.agent_loop_workers_class))
        arguments = cloudpickle.dumps((config, llm_client, teacher_client, reward_loop_worker_handles))
        run = uuid.uuid4().hex[:8]
        self._orphans: list[_Placed] = []
        self._workers = [
            _Worker(
                actor.options(
                    name=f"agent_loop_worker_{i}_{run}",
                    num_cpus=0,
                    max_restarts=MAX_RESTARTS,
                    max_concurrency=MAX_CONCURRENT_CALLS,
                    scheduling_strategy="SPREAD",
                ).remote(arguments)
            )
            for i in range(n_workers)
        ]
        try:
            reports = ray_get(
                [worker.handle.report.remote() for worker in self._workers],
                what=f"{n_workers} agent-loop workers to start",
                timeout_s=START_TIMEOUT_S,
            )
        except BaseException:
            self.shutdown()
            raise
        for worker, report in zip(self._workers, reports, strict=True):
            worker.life = report["life"]

    @classmethod
    def create(
        cls,
        config: Any,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: Sequence[Any] | None = None,
    ) -> AgentLoopManagerTQ:
        """Start the workers and wait until they are ready. May be awaited."""
        return cls(config, llm_client, teacher_client, reward_loop_worker_handles)

    def __await__(self) -> Generator[Any, None, AgentLoopManagerTQ]:
        return self
        yield  # noqa: B901 -- makes this a generator, which `await` needs

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Hand prompts to the workers; their rows appear in the TransferQueue.

        Args:
            prompts: one row a prompt: object columns (`uid`, `raw_prompt`, ...), and for the whole batch `global_steps`
                (int) and `validate` (bool, default false). Tensor columns stay behind.

        Raises:
            ContractError: a batch without uid, raw_prompt or global_steps.
            RlflowError: no worker is left.
        """
        rows, global_steps, validate = rows_of(prompts)
        self._recover()
        self._place([_Placed(row, global_steps, validate) for row in rows])

    def status(self) -> dict[str, Any]:
        """For stall reports.

        Returns:
            `running`: one dict per session, oldest first: uid, session, worker, phase, age_s, phase_s, turns, tokens.
            `workers`: one dict per worker: index, alive, problem (None or text), prompts, sessions and its counters.
        """
        self._recover()
        running, workers = [], []
        for index, worker in enumerate(self._workers):
            report = worker.report or {}
            sessions = report.get("sessions", [])
            running += [{**session, "worker": index} for session in sessions]
            counts = {key: value for key, value in report.items() if key not in ("life", "uids", "sessions")}
            workers.append(
                {
                    "index": index,
                    "alive": worker.problem is None,
                    "problem": worker.problem,
                    "prompts": len(worker.placed),
                    "sessions": len(sessions),
                    **counts,
                }
            )
        return {"running": sorted(running, key=lambda item: -item["age_s"]), "workers": workers}

    def shutdown(self) -> None:
        """End the workers; may be called twice."""
        import ray

        workers, self._workers = self._workers, []
        for worker in workers:
            ray.kill(worker.handle)

    def _place(self, rows: Sequence[_Placed]) -> None:
        """Give each prompt to the worker with the fewest sessions, until every prompt has one that took it."""
        from ray.exceptions import RayActorError

        waiting = list(rows)
        if self._settings.rollout.full_determinism:
            self._announce(waiting)
        while waiting:
            shares: dict[int, list[_Placed]] = {}
            for placed in waiting:
                index = self._least_loaded()
                self._workers[index].load += max(1, len(self._settings.session_numbers(placed.row, placed.validate)))
                shares.setdefault(index, []).append(placed)
            waiting = []
            for index, share in shares.items():
                try:
                    self._submit(index, share)
                except (RayActorError, DeadlineError) as error:
                    self._workers[index].problem = _first_line(error)
                    logger.warning("agent-loop worker %d takes no prompts: %s", index, self._workers[index].problem)
                    waiting += share

    def _announce(self, rows: Sequence[_Placed]) -> None:
        names = [
            session_name(str(placed.row["uid"]), number)
            for placed in rows
            for number in self._settings.session_numbers(placed.row, placed.validate)
        ]
        self._client.announce_sessions(names, [uid for worker in self._workers for uid in worker.placed])

    def _submit(self, index: int, share: Sequence[_Placed]) -> None:
        worker = self._workers[index]
        groups: dict[tuple[int, bool], list[_Placed]] = {}
        for placed in share:
            groups.setdefault((placed.global_steps, placed.validate), []).append(placed)
        refs = [
            worker.handle.submit.remote([placed.row for placed in group], step, validate)
            for (step, validate), group in groups.items()
        ]
        ray_get(refs, what=f"agent-loop worker {index} to take {len(share)} prompts", timeout_s=SUBMIT_TIMEOUT_S)
        worker.placed.update({str(placed.row["uid"]): placed for placed in share})

    def _least_loaded(self) -> int:
        usable = [i for i, worker in enumerate(self._workers) if worker.problem is None]
        if not usable:
            self._wait_for_a_worker()
            return self._least_loaded()
        return min(usable, key=lambda i: self._workers[i].load)

    def _wait_for_a_worker(self) -> None:
        """Return when a worker answers again; Ray restarts dead ones."""
        deadline = monotonic() + RESTART_TIMEOUT_S
        while self._workers and monotonic() < deadline:
            self._orphans += self._poll()
            if any(worker.problem is None for worker in self._workers):
                return
            sleep(RESTART_PAUSE_S)  # a restarting actor refuses calls, so there is nothing to await
        problems = "; ".join(f"{i}: {worker.problem}" for i, worker in enumerate(self._workers))
        raise RlflowError(
            f"no agent-loop worker answers ({problems or 'all were shut down'}). See their logs in the Ray session "
            "directory; a worker that is killed again and again is often out of memory"
        )

    def _poll(self) -> list[_Placed]:
        """Ask all workers how they are. Returns what may have been lost with a worker that died since."""
        from ray.exceptions import RayActorError

        refs = [worker.handle.report.remote() for worker in self._workers]
        end = monotonic() + REPORT_TIMEOUT_S  # for all of them together
        orphans: list[_Placed] = []
        for index, (worker, ref) in enumerate(zip(self._workers, refs, strict=True)):
            try:
                report = ray_get(ref, what=f"agent-loop worker {index}", timeout_s=max(0.1, end - monotonic()))
            except DeadlineError as error:
                worker.problem = _first_line(error)
                continue
            except RayActorError as error:
                # Away while Ray restarts it, or gone for good: either way what it held is over.
                worker.problem, worker.report, worker.load = _first_line(error), None, 0
                orphans += worker.placed.values()
                worker.placed = {}
                continue
            if report["life"] != worker.life:
                orphans += worker.placed.values()
                worker.placed, worker.life = {}, report["life"]
            active = set(report["uids"])
            worker.placed = {uid: placed for uid, placed in worker.placed.items() if uid in active}
            worker.report, worker.problem, worker.load = report, None, len(report["sessions"])
        return orphans

    def _recover(self) -> None:
        """Start prompts again whose worker died before it finished them."""
        from rlflow import transfer_queue as tq

        orphans, self._orphans = [*self._orphans, *self._poll()], []
        for partition in (TRAIN, VAL):
            mine = {str(placed.row["uid"]): placed for placed in orphans if placed.validate == (partition == VAL)}
            if not mine:
                continue
            tags = tq.kv_list(partition).get(partition, {})
            lost = {uid: mine[uid] for uid in mine if uid in tags and tags[uid].get("status") not in _DONE}
            # Rows of sessions that were done go: the prompt starts again, and may end with fewer of them.
            partial = [key for key in tags if key not in lost and key.split("_", 1)[0] in lost]
            if partial:
                tq.kv_clear(partial, partition)
            if lost:
                shown = ", ".join(list(lost)[:8])
                logger.error("an agent-loop worker died; %d prompts start again: %s", len(lost), shown)
                self._place(list(lost.values()))


def _actor_class(worker_class: type) -> type:
    """The worker class, built from one packed argument.

    Actor handles given to Ray as plain arguments make it warn that a restart may lose them; these handles are held by
    the manager for as long as the workers live.
    """

    class AgentLoopWorker(worker_class):  # type: ignore[misc, valid-type]
        def __init__(self, arguments: bytes) -> None:
            from ray import cloudpickle

            super().__init__(*cloudpickle.loads(arguments))

    return AgentLoopWorker


def rows_of(prompts: TensorDict) -> tuple[list[dict[str, Any]], int, bool]:
    """(dataset columns of each prompt, global_steps, validate) of a batch. `index` defaults to the row number.

    Raises:
        ContractError: no uid, raw_prompt or global_steps.
    """
    from rlflow.utils import tensordict_utils as tu

    n = prompts.batch_size[0] if len(prompts.batch_size) else 0
    columns: dict[str, list[Any]] = {}
    for name in prompts.keys():
        value = prompts.get(name)
        if name in BATCH_OPTIONS or (not isinstance(value, (tu.NonTensorStack, tu.NonTensorData))):
            continue
        plain = tu.unwrap_non_tensor_data(value)
        # TensorDict folds a column of equal objects into one; it still belongs to every row.
        columns[str(name)] = plain if isinstance(value, tu.NonTensorStack) else [plain] * n
    missing = [name for name in ("uid", "raw_prompt") if name not in columns]
    global_steps = tu.get(prompts, "global_steps")
    if isinstance(global_steps, list):
        global_steps = global_steps[0]
    if missing or global_steps is None:
        missing += [] if global_steps is not None else ["global_steps"]
        raise ContractError(f"a batch of prompts needs {', '.join(missing)}; it has {sorted(map(str, prompts.keys()))}")
    validate = tu.get(prompts, "validate", False)
    validate = bool(validate[0] if isinstance(validate, list) else validate)
    rows = [{name: values[i] for name, values in columns.items()} for i in range(n)]
    for i, row in enumerate(rows):
        if row.get("index") is None:
            row["index"] = i
    return rows, int(global_steps), validate


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
