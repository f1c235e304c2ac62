"""A reward worker: an actor without CPU of its own that scores trajectories.

Invariants
    - `compute_score` always answers with `Score` or `Invalid`, within the deadline of `reward.timeout_s` plus the time
      the call waited for a free scorer process.
    - The first failure of each kind is logged as an error; the rest are counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine
from time import monotonic
from typing import Any

from rlflow.reward_loop.pool import QueueClock, ScorerPool, queue_clock
from rlflow.reward_loop.process import LOAD_TIMEOUT_S
from rlflow.reward_loop.result import Invalid, InvalidRewardError, RewardInput, RewardResult, one_line, to_score
from rlflow.reward_loop.reward_manager import RewardManagerBase, resolve_reward_manager_cls
from rlflow.reward_loop.scorer import ScorerSpec
from rlflow.utils.errors import ConfigError
from rlflow.utils.import_utils import import_external_libs
from rlflow.utils.redact import protect_process, redact_text

logger = logging.getLogger(__name__)

# The manager's own work around the scorer: decoding, a copy of extra_info.
MANAGER_GRACE_S = 5.0
MAX_REASON_KINDS = 50


class LazyTokenizer:
    """The policy's tokenizer, loaded when first used: most managers get text and never need it (nor torch)."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._tokenizer: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._load(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._load()(*args, **kwargs)

    def _load(self) -> Any:
        if self._tokenizer is None:
            from rlflow.utils.tokenizer import policy_tokenizer

            self._tokenizer = policy_tokenizer(self._config)
        return self._tokenizer


class RewardLoopWorker:
    """Ray actor class (made one by `RewardLoopManager`).

    Args:
        config: the whole resolved config.
        spec: the reward function.
        timeout_s: seconds one call of it may take.
        processes: scorer processes of this worker.
    """

    def __init__(self, config: Any, spec: ScorerSpec, timeout_s: float, processes: int) -> None:
        from omegaconf import OmegaConf

        protect_process(config)
        self._config = config
        self._spec = spec
        self._timeout_s = timeout_s
        self._n_processes = processes
        self._load_timeout_s = float(OmegaConf.select(config, "reward.load_timeout_s", default=LOAD_TIMEOUT_S))
        self._pool: ScorerPool | None = None
        self._manager: RewardManagerBase | None = None
        self._start_lock = asyncio.Lock()
        self._active = 0
        self._scored = 0
        self._invalid: Counter[str] = Counter()

    async def start(self) -> str | None:
        """Load the reward function and the manager. Returns None, or what is wrong with the configuration."""
        try:
            await self._ensure_started()
        except (ConfigError, ValueError, OSError, AttributeError, RuntimeError, ImportError, TypeError) as error:
            return str(error)
        return None

    async def compute_score(self, data: RewardInput) -> RewardResult:
        """Score one trajectory."""
        self._active += 1
        try:
            result = await self._compute_score(data)
        finally:
            self._active -= 1
        if isinstance(result, Invalid):
            result = Invalid(redact_text(result.reason))  # it goes to logs, tags, dumps and the journal
            self._report(result.reason, data)
        else:
            self._scored += 1
        return result

    async def status(self) -> dict[str, Any]:
        """Counters: active calls, scored, invalid by reason, process ids of the scorers."""
        return {
            "active": self._active,
            "scored": self._scored,
            "invalid": dict(self._invalid),
            "scorer_pids": self._pool.pids() if self._pool is not None else [],
        }

    async def shutdown(self) -> None:
        """End the scorer processes."""
        if self._pool is not None:
            await self._pool.close()

    async def _ensure_started(self) -> RewardManagerBase:
        async with self._start_lock:  # also a worker that Ray restarted gets here without `start`
            if self._manager is None:
                if self._pool is None:
                    self._pool = ScorerPool(self._spec, self._timeout_s, self._n_processes, self._load_timeout_s)
                await self._pool.start()
                self._manager = self._make_manager(self._pool)
            return self._manager

    def _make_manager(self, pool: ScorerPool) -> RewardManagerBase:
        from omegaconf import OmegaConf

        async def compute_score(**keywords: Any) -> float | dict[str, Any]:
            return await pool.call(**keywords)

        # A user's module may register the manager.
        import_external_libs(OmegaConf.select(self._config, "actor_rollout_ref.model.external_lib"))
        return resolve_reward_manager_cls(self._config)(
            config=self._config,
            tokenizer=LazyTokenizer(self._config),
            compute_score=compute_score,
            reward_router_address=None,
            reward_model_tokenizer=None,
        )

    async def _compute_score(self, data: RewardInput) -> RewardResult:
        try:
            manager = await self._ensure_started()
            return to_score(await self._within_deadline(manager.run_single(data)))
        except InvalidRewardError as error:
            return Invalid(one_line(error))
        except Exception as error:  # noqa: BLE001 -- managers may be users' code; a bad one masks samples, not the run
            logger.debug("reward manager failed", exc_info=True)
            return Invalid(one_line(f"the reward manager raised {type(error).__name__}: {error}"))

    async def _within_deadline(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await `work` for `timeout_s` and a grace, not counting the time it waits for a scorer process."""
        clock = QueueClock()
        token = queue_clock.set(clock)
        try:
            task = asyncio.create_task(work)  # the task copies the context, and with it the clock
        finally:
            queue_clock.reset(token)
        started = monotonic()
        try:
            while not task.done():
                left = self._timeout_s + MANAGER_GRACE_S - (monotonic() - started - clock.seconds())
                if left <= 0:
                    raise InvalidRewardError(f"the reward manager gave no score within {self._timeout_s:g} s")
                await asyncio.wait({task}, timeout=left)
            return task.result()
        finally:
            task.cancel()

    def _report(self, reason: str, data: RewardInput) -> None:
        source = str(data.non_tensor_batch.get("data_source"))
        kind = f"{source}: {reason[:80]}"
        if kind not in self._invalid and len(self._invalid) >= MAX_REASON_KINDS:
            kind = "other reasons"
        self._invalid[kind] += 1
        if self._invalid[kind] == 1:
            uid, session = data.non_tensor_batch.get("uid"), data.non_tensor_batch.get("session_id")
            logger.error("no reward for %s session %s (data_source %s): %s", uid, session, one_line(source), reason)
