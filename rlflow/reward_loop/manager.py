"""Starts the reward workers, and the reward model where there is one.

At start-up all is checked that can be: file, function, manager class, the model and its head.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlflow.reward_loop.client import RewardWorkerClient
from rlflow.reward_loop.result import RewardInput, RewardResult
from rlflow.reward_loop.scorer import scorer_spec
from rlflow.reward_loop.worker import RewardLoopWorker
from rlflow.utils.errors import ConfigError, ContractError, DeadlineError
from rlflow.utils.ray_utils import ray_get, run_coroutine

if TYPE_CHECKING:
    from rlflow.reward_loop.reward_model import RewardModelManager

logger = logging.getLogger(__name__)

# A restarted worker loads its function at the first call.
MAX_RESTARTS = 3
MAX_CONCURRENT_CALLS = 10_000
STATUS_TIMEOUT_S = 10.0
# Of the worker processes themselves, on a busy machine; importing the function has reward.load_timeout_s.
START_TIMEOUT_S = 180.0
# Where no configuration says it.
BATCH_TIMEOUT_S = 3600.0


class RewardLoopManager:
    """Reward workers of a run.

    Args:
        config: the whole resolved config. Read here: `reward.num_workers`, `reward.timeout_s`,
            `reward.load_timeout_s`, `reward.processes_per_worker`, `reward.custom_reward_function`,
            `reward.reward_manager`, `reward.reward_model`.
        rm_resource_pool: devices of a reward model: its own, or those it shares with training. Rule rewards need none.

    Raises:
        ConfigError: the reward function, the manager or the reward model cannot be loaded (the message names the path
            and what is there).
    """

    def __init__(self, config: Any, rm_resource_pool: Any = None) -> None:
        import ray
        from omegaconf import OmegaConf

        from rlflow.config.reward import RewardConfig, is_colocated

        defaults = RewardConfig()
        timeout_s = float(OmegaConf.select(config, "reward.timeout_s", default=defaults.timeout_s))
        n_workers = int(OmegaConf.select(config, "reward.num_workers", default=defaults.num_workers))
        processes = int(OmegaConf.select(config, "reward.processes_per_worker", default=2))
        load_s = float(OmegaConf.select(config, "reward.load_timeout_s", default=defaults.load_timeout_s))
        numbers = {
            "timeout_s": timeout_s,
            "load_timeout_s": load_s,
            "num_workers": n_workers,
            "processes_per_worker": processes,
        }
        for key, value in numbers.items():
            if value <= 0:
                raise ConfigError(f"reward.{key}={value} cannot work; it must be positive")
        spec = scorer_spec(config)
        self._workers: list[Any] = []
        self._colocated = is_colocated(config)
        self._batch_timeout_s = float(OmegaConf.select(config, "trainer.call_timeout_s") or BATCH_TIMEOUT_S)
        self.reward_model = _launch_reward_model(config, rm_resource_pool)
        # As bytes: an argument that holds handles would lie in the object store, and a worker is started again from it.
        client = None if self.reward_model is None else ray.cloudpickle.dumps(self.reward_model.get_client())
        worker: Any = ray.remote(RewardLoopWorker)
        run = uuid.uuid4().hex[:8]
        self._workers = [
            worker.options(
                name=f"reward_loop_worker_{i}_{run}",
                num_cpus=0,
                max_restarts=MAX_RESTARTS,
                max_concurrency=MAX_CONCURRENT_CALLS,
                scheduling_strategy="SPREAD",
            ).remote(config, spec, timeout_s, processes, client)
            for i in range(n_workers)
        ]
        try:
            problems = ray_get(
                [handle.start.remote() for handle in self._workers],
                what=f"{n_workers} reward workers to load {spec.label}",
                timeout_s=START_TIMEOUT_S + load_s,
            )
            if any(problems):
                raise ConfigError(next(problem for problem in problems if problem))
            if self.reward_model is not None and self._colocated:
                self.reward_model.sleep()
        except BaseException:
            self.shutdown()
            raise
        logger.info("%d reward workers score with %s", n_workers, spec.label)

    @property
    def reward_loop_worker_handles(self) -> list[Any] | None:
        """Actor handles for agent loops; `handle.compute_score.remote(RewardInput) -> Score | Invalid`.

        None with a colocated reward model: it cannot score while sessions run; see `compute_rm_score`.
        """
        return None if self._colocated else self._workers

    @property
    def workers(self) -> list[Any]:
        """Actor handles of the reward workers, whoever asks them."""
        return self._workers

    def compute_rm_score(self, data: Sequence[RewardInput]) -> list[RewardResult]:
        """Scores of trajectories from a colocated reward model, which has the devices meanwhile; in their order.

        Each is bounded by the deadlines of its worker, all of them by `trainer.call_timeout_s`.

        Raises:
            ContractError: there is no colocated reward model.
            DeadlineError: a reward worker hangs.
            RolloutError: a server of the model is dead.
        """
        if self.reward_model is None or not self._colocated:
            raise ContractError(
                "compute_rm_score is for a colocated reward model; here reward workers score while sessions run"
            )
        client = RewardWorkerClient(self._workers)

        async def score_all() -> list[RewardResult]:
            try:
                async with asyncio.timeout(self._batch_timeout_s):
                    return list(await asyncio.gather(*(client.score(item) for item in data)))
            except TimeoutError as error:
                raise DeadlineError(
                    f"the reward workers did not score {len(data)} trajectories within trainer.call_timeout_s="
                    f"{self._batch_timeout_s:.0f} s"
                ) from error

        self.reward_model.wake_up()
        try:
            return run_coroutine(score_all())
        finally:
            self.reward_model.sleep()

    def status(self) -> list[dict[str, Any]]:
        """One dict per worker: its counters, or `{"dead": reason}`."""
        from ray.exceptions import RayActorError

        refs = [handle.status.remote() for handle in self._workers]
        states: list[dict[str, Any]] = []
        for i, ref in enumerate(refs):
            try:
                states.append(ray_get(ref, what=f"status of reward worker {i}", timeout_s=STATUS_TIMEOUT_S))
            except (RayActorError, DeadlineError) as error:
                states.append({"dead": str(error).splitlines()[0]})
        return states

    def shutdown(self) -> None:
        """End the workers and their scorer processes; may be called twice."""
        import ray

        workers, self._workers = self._workers, []
        for handle in workers:
            # Scorer processes go with their worker: its end of their stdin closes, and their guards act.
            ray.kill(handle)
        if self.reward_model is not None:
            self.reward_model.shutdown()


def _launch_reward_model(config: Any, pool: Any) -> RewardModelManager | None:
    """The servers of the configured reward model; None without one."""
    from rlflow.config.reward import need_reward_model

    if not need_reward_model(config):
        return None
    from rlflow.reward_loop.reward_model import RewardModelManager

    manager = RewardModelManager(config, pool)
    manager.launch()
    return manager
