"""An agent-loop worker: an actor without CPU of its own that runs the sessions of many prompts at once.

Invariants
    - A prompt's marker goes running -> finished | failure, and the last step is written only after all its sessions
      settled, so that a sampler that sees it finds every row the prompt will ever have.
    - A session either writes all its rows in one put or none. Its failure names uid, session and reason, in the log
      and in the marker's tag (`failed_sessions`, `failed`).
    - Every session ends by `rollout.agent.session_timeout_s`; with `rollout.full_determinism` the servers are told.
    - The greedy session of a prompt that wants a baseline stores no row: its score goes to the tags of the prompt's
      rows (`reward_baseline`). When it fails, so does the prompt, and its rows go: they could not be trained.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlflow import transfer_queue as tq
from rlflow.agent_loop.base import AgentLoopBase, DictConfigWrap, ToolListWrap
from rlflow.agent_loop.output import AgentLoopOutput
from rlflow.agent_loop.registry import LoopTable
from rlflow.agent_loop.rows import build_rows
from rlflow.agent_loop.scoring import RewardClient
from rlflow.agent_loop.session import Session, SessionClient, session_name, within_deadline
from rlflow.agent_loop.settings import BASELINE_COLUMN, TRAIN, VAL, AgentLoopSettings
from rlflow.agent_loop.template_cache import TemplateCache
from rlflow.reward_loop.result import one_line
from rlflow.utils.errors import ContractError, DataError, RewardError
from rlflow.utils.import_utils import import_external_libs
from rlflow.utils.redact import protect_process, redact_text
from rlflow.utils.tokenizer import policy_tokenizer

logger = logging.getLogger(__name__)

Row = dict[str, Any]
# Columns that steer this worker; loops and scorers do not see them.
CONTROL_COLUMNS = ("agent_name", "__rollout_n__", "__do_sample__", BASELINE_COLUMN)


@dataclass
class _Prompt:
    """One prompt while its sessions run.

    Fields:
        row: its dataset columns.
        global_steps: the step that submitted it.
        stored: keys of the rows that its sessions have stored.
        baseline: score of its greedy session.
    """

    uid: str
    row: Row
    global_steps: int
    validate: bool
    cache: TemplateCache
    stored: list[str] = field(default_factory=list)
    baseline: float | None = None

    @property
    def partition(self) -> str:
        return VAL if self.validate else TRAIN


class AgentLoopWorkerTQ:
    """Ray actor class (made one by `AgentLoopManagerTQ`).

    Args:
        config: the whole resolved config.
        llm_client: client of the rollout servers; its `generate` is awaited.
        teacher_client: kept for distillation; must be None.
        reward_loop_worker_handles: who scores; None or empty: only loops that set `reward_score` get scores.
    """

    def __init__(
        self,
        config: Any,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: Sequence[Any] | None = None,
    ) -> None:
        from omegaconf import OmegaConf

        from rlflow.data import get_dataset_class

        protect_process(config)
        if teacher_client is not None:
            raise ContractError("this version has no distillation; teacher_client must be None")
        namespace = OmegaConf.select(config, "transfer_queue.namespace")
        if namespace:  # without one, the first call attaches to the table of the default namespace
            tq.init({"namespace": namespace})
        self._config = config
        self._client = llm_client
        self._settings = AgentLoopSettings.from_config(config)
        self._tokenizer = policy_tokenizer(config)
        import_external_libs(OmegaConf.select(config, "actor_rollout_ref.model.external_lib"))
        self._loops = LoopTable(self._settings.rollout.agent.agent_loop_config_path)
        self._loops.get(self._settings.rollout.agent.default_agent_loop)
        self._rewards = RewardClient(reward_loop_worker_handles or (), self._tokenizer)
        self._dataset_cls = get_dataset_class(OmegaConf.select(config, "data") or {})
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._sessions: dict[str, Session] = {}
        self._life = uuid.uuid4().hex
        self._name = _own_name()
        self._counts = {"prompts_done": 0, "sessions_failed": 0, "prompts_cut": 0}

    async def submit(self, rows: list[Row], global_steps: int, validate: bool) -> None:
        """Start the sessions of these prompts and return; results go to the TransferQueue.

        Args:
            rows: dataset columns of each prompt, `uid` among them.
            global_steps: the step that submits them.
            validate: partition and sampling of validation.
        """
        for row in rows:
            uid = str(row["uid"])
            if uid in self._tasks:
                logger.warning("prompt %s is running here already; the second submission is ignored", uid)
                continue
            task = asyncio.create_task(self._run_prompt(uid, row, global_steps, validate), name=f"prompt {uid}")
            self._tasks[uid] = task
            task.add_done_callback(partial(self._forget, uid))

    async def report(self) -> dict[str, Any]:
        """Heartbeat: this life of the actor, its prompts, its sessions oldest first, its counters."""
        sessions = sorted((session.report() for session in self._sessions.values()), key=lambda item: -item["age_s"])
        return {"life": self._life, "uids": list(self._tasks), "sessions": sessions, **self._counts}

    def _forget(self, uid: str, _: asyncio.Task[None]) -> None:
        self._tasks.pop(uid, None)

    async def _run_prompt(self, uid: str, row: Row, global_steps: int, validate: bool) -> None:
        prompt = _Prompt(uid, row, global_steps, validate, TemplateCache(uid))
        failures: list[BaseException] = []
        try:
            await tq.async_kv_put(uid, prompt.partition, tag={"status": "running"})
            n = self._settings.sessions(row, validate)
            if n < 1:
                raise DataError(f"prompt {uid} asks for {n} sessions; __rollout_n__ must be at least 1")
            numbers = self._settings.session_numbers(row, validate)
            results = await asyncio.gather(*(self._run_session(prompt, i) for i in numbers), return_exceptions=True)
            failures = [result for result in results if isinstance(result, BaseException)]
            if len(numbers) > n:
                await _pass_on_baseline(prompt)
            self._counts["prompts_cut"] += prompt.cache.tokens_cut > 0
        except Exception as error:  # noqa: BLE001 -- whatever happens, the marker must leave `running`
            logger.exception("prompt %s failed", uid)
            failures = [error]
            if self._settings.rollout.full_determinism:  # some sessions may never have begun
                for i in self._settings.session_numbers(row, validate):
                    self._client.end_session(session_name(uid, i))
        tag: dict[str, Any] = {"status": "finished"}
        if failures:
            reason = one_line(redact_text(f"{type(failures[0]).__name__}: {failures[0]}"))
            tag = {"status": "failure", "failed_sessions": len(failures), "failed": reason}
        self._counts["prompts_done"] += 1
        self._counts["sessions_failed"] += len(failures)
        try:
            await tq.async_kv_put(uid, prompt.partition, tag=tag)
        except Exception:  # noqa: BLE001 -- a background task; the log is the only place left to tell
            logger.exception("the marker of prompt %s could not be set to %s", uid, tag["status"])

    async def _run_session(self, prompt: _Prompt, session_id: int) -> None:
        session = Session(prompt.uid, session_id, worker=self._name)
        self._sessions[session.name] = session
        is_baseline = session_id == self._settings.baseline_session(prompt.row, prompt.validate)
        work = self._score_greedy(session, prompt) if is_baseline else self._store_sampled(session, prompt)
        try:
            await within_deadline(work, session, self._settings.rollout.agent.session_timeout_s)
        except Exception:
            logger.exception("session %d of prompt %s failed in %r", session_id, prompt.uid, session.phase)
            raise
        finally:
            del self._sessions[session.name]
            if self._settings.rollout.full_determinism:
                self._client.end_session(session.name)

    async def _store_sampled(self, session: Session, prompt: _Prompt) -> None:
        """One session from prompt to stored rows."""
        outputs, invalid = await self._unfold(session, prompt, prompt.row)
        if not outputs:
            logger.warning("session %d of prompt %s ended without a row", session.session_id, session.uid)
            return
        session.enter("store")
        stored = build_rows(
            outputs,
            row=_columns(prompt.row),
            session=session,
            global_steps=prompt.global_steps,
            with_log_probs=self._settings.rollout.calculate_log_probs,
            with_scores=bool(self._rewards) or outputs[-1].reward_score is not None,
            invalid=invalid,
            scored_later=not self._rewards,
        )
        if not session.abandoned:
            await tq.async_kv_batch_put(stored.keys, prompt.partition, fields=stored.fields, tags=stored.tags)
            prompt.stored += stored.keys

    async def _score_greedy(self, session: Session, prompt: _Prompt) -> None:
        """The session of the most likely answer; only its score is kept."""
        outputs, invalid = await self._unfold(session, prompt, {**prompt.row, "__do_sample__": False})
        score = outputs[-1].reward_score if outputs else None
        if invalid is not None or score is None:
            why = invalid or ("nobody scores it" if outputs else "the agent loop returned no output")
            raise RewardError(f"the greedy session of prompt {prompt.uid} has no score to be a baseline: {why}")
        prompt.baseline = score

    async def _unfold(self, session: Session, prompt: _Prompt, row: Row) -> tuple[list[AgentLoopOutput], str | None]:
        """Run the agent loop and score its outputs; also returns why the score is invalid."""
        columns = _columns(row)
        name = row.get("agent_name") or self._settings.rollout.agent.default_agent_loop
        loop = self._make_loop(name, session, prompt.cache)
        session.enter("loop")
        names = {"uid": session.uid, "session_id": session.session_id, "global_steps": prompt.global_steps}
        result = await loop.run(self._settings.sampling_params(row, prompt.validate), **{**columns, **names})
        outputs = self._checked(result, name, session)
        session.enter("reward")
        return outputs, await self._rewards.score_session(outputs, columns, session) if outputs else None

    def _make_loop(self, name: str, session: Session, cache: TemplateCache) -> AgentLoopBase:
        spec, rollout = self._loops.get(name), self._settings.rollout
        loop = spec.cls(
            trainer_config=DictConfigWrap(self._config),
            server_manager=SessionClient(self._client, session, rollout.seed, announced=rollout.full_determinism),
            tokenizer=self._tokenizer,
            processor=None,
            dataset_cls=self._dataset_cls,
            data_config=DictConfigWrap(self._config.data),
            tools=ToolListWrap([]),
            **spec.kwargs,
        )
        loop.template_cache = cache
        return loop

    def _checked(self, result: Any, name: str, session: Session) -> list[AgentLoopOutput]:
        outputs = [] if result is None else [result] if isinstance(result, AgentLoopOutput) else list(result)
        for output in outputs:
            if not isinstance(output, AgentLoopOutput):
                raise ContractError(
                    f"agent loop {name} returned a {type(output).__name__} for session {session.name}; expected "
                    "AgentLoopOutput, a list of them, or None"
                )
            output.check(self._settings.rollout.response_length, name)
        return outputs


def _columns(row: Row) -> Row:
    """What loops and scorers see of a prompt."""
    return {name: value for name, value in row.items() if name not in CONTROL_COLUMNS}


async def _pass_on_baseline(prompt: _Prompt) -> None:
    """Note the greedy score in the tags of the prompt's rows; without one the rows go."""
    if not prompt.stored:
        return
    if prompt.baseline is None:
        await tq.async_kv_clear(prompt.stored, prompt.partition)
        return
    tags = [{"reward_baseline": prompt.baseline} for _ in prompt.stored]
    await tq.async_kv_batch_put(prompt.stored, prompt.partition, tags=tags)


def _own_name() -> str:
    """`agent_loop_worker_0`: the name of this actor, without the part that tells runs apart."""
    import ray

    name = ray.get_runtime_context().get_actor_name() if ray.is_initialized() else None
    return name.rpartition("_")[0] if name else "agent_loop_worker"
