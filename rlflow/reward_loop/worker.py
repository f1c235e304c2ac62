"""A reward worker: an actor without CPU of its own that scores trajectories.

Invariants
    - `compute_score` always answers with `Score` or `Invalid`, within the deadline of `reward.timeout_s` plus the time
      the call waited for a free scorer process; when a reward model scores, within its `request_timeout_s`.
    - The first failure of each kind is logged as an error; the rest are counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from rlflow.reward_loop import lazy_tokenizer
from rlflow.reward_loop.lazy_tokenizer import LazyTokenizer
from rlflow.reward_loop.pool import QueueClock, ScorerPool, queue_clock
from rlflow.reward_loop.process import LOAD_TIMEOUT_S
from rlflow.reward_loop.result import Invalid, InvalidRewardError, RewardInput, RewardResult, one_line, to_score
from rlflow.reward_loop.reward_manager import RewardManagerBase, resolve_reward_manager_cls
from rlflow.reward_loop.scorer import ScorerSpec
from rlflow.utils.errors import ConfigError
from rlflow.utils.import_utils import import_external_libs
from rlflow.utils.redact import protect_process, redact_text

if TYPE_CHECKING:
    from rlflow.reward_loop.reward_model_client import RewardModelClient
    from rlflow.reward_loop.router import RewardRouter

logger = logging.getLogger(__name__)

# The manager's own work around the scorer: decoding, a copy of extra_info.
MANAGER_GRACE_S = 5.0
MAX_REASON_KINDS = 50


class RewardLoopWorker:
    """Ray actor class (made one by `RewardLoopManager`).

    Args:
        config: the whole resolved config.
        spec: the reward function.
        timeout_s: seconds one call of it may take.
        processes: scorer processes of this worker.
        reward_model: pickled client of the reward model; None without one. The model scores where no function is named;
            a function or a manager of the user's may ask it through `reward_router_address`.
    """

    def __init__(
        self,
        config: Any,
        spec: ScorerSpec,
        timeout_s: float,
        processes: int,
        reward_model: bytes | None = None,
    ) -> None:
        from omegaconf import OmegaConf
        from ray import cloudpickle

        protect_process(config)
        self._config = config
        self._spec = spec
        self._reward_model: RewardModelClient | None = None
        self._timeout_s = timeout_s
        self._model_scores = reward_model is not None and _nobody_else_scores(config, spec)
        if reward_model is not None:
            self._reward_model = cloudpickle.loads(reward_model)
        if self._reward_model is not None and self._model_scores:
            self._timeout_s = self._reward_model.timeout_s
        self._router: RewardRouter | None = None
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
        """End the scorer processes and the router."""
        if self._pool is not None:
            await self._pool.close()
        if self._router is not None:
            self._router.close()

    async def _ensure_started(self) -> RewardManagerBase:
        async with self._start_lock:  # also a worker that Ray restarted gets here without `start`
            if self._manager is None and self._model_scores:
                self._manager = self._ask_the_model()
            elif self._manager is None:
                if self._pool is None:
                    self._pool = ScorerPool(self._spec, self._timeout_s, self._n_processes, self._load_timeout_s)
                await self._pool.start()
                self._manager = self._make_manager(self._pool)
            return self._manager

    def _ask_the_model(self) -> RewardManagerBase:
        from rlflow.reward_loop.reward_manager.discriminative import DiscriminativeRewardManager

        assert self._reward_model is not None
        tokenizer = LazyTokenizer(partial(lazy_tokenizer.policys, self._config))
        return DiscriminativeRewardManager(self._config, tokenizer, self._reward_model.score)

    def _make_manager(self, pool: ScorerPool) -> RewardManagerBase:
        from omegaconf import OmegaConf

        async def compute_score(**keywords: Any) -> float | dict[str, Any]:
            return await pool.call(**keywords)

        # A user's module may register the manager.
        import_external_libs(OmegaConf.select(self._config, "actor_rollout_ref.model.external_lib"))
        return resolve_reward_manager_cls(self._config)(
            config=self._config,
            tokenizer=LazyTokenizer(partial(lazy_tokenizer.policys, self._config)),
            compute_score=compute_score,
            **self._door_to_the_model(),
        )

    def _door_to_the_model(self) -> dict[str, Any]:
        """How functions and managers reach the reward model: an address, and its tokenizer."""
        if self._reward_model is None:
            return {"reward_router_address": None, "reward_model_tokenizer": None}
        from rlflow.reward_loop.router import RewardRouter

        if self._router is None:
            self._router = RewardRouter(self._reward_model)
        path = str(self._config.reward.reward_model.model_path)
        return {
            "reward_router_address": self._router.address,
            "reward_model_tokenizer": LazyTokenizer(partial(lazy_tokenizer.of_path, path)),
        }

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


def _nobody_else_scores(config: Any, spec: ScorerSpec) -> bool:
    """Whether the configuration names neither a reward function nor a manager: then the reward model itself scores."""
    from omegaconf import OmegaConf

    manager = OmegaConf.select(config, "reward.reward_manager") or {}
    chosen = (manager.get("source") or "register", manager.get("name") or "naive")
    return spec.path is None and chosen == ("register", "naive")
