"""Starts the reward workers and checks at start-up what can be checked: file, function, manager class."""

from __future__ import annotations

import logging
import uuid
from typing import Any

from rlflow.reward_loop.scorer import scorer_spec
from rlflow.reward_loop.worker import RewardLoopWorker
from rlflow.utils.errors import ConfigError
from rlflow.utils.ray_utils import ray_get

logger = logging.getLogger(__name__)

# A restarted worker loads its function at the first call.
MAX_RESTARTS = 3
MAX_CONCURRENT_CALLS = 10_000
STATUS_TIMEOUT_S = 10.0
# Of the worker processes themselves, on a busy machine; importing the function has reward.load_timeout_s.
START_TIMEOUT_S = 180.0


class RewardLoopManager:
    """Reward workers of a run.

    Args:
        config: the whole resolved config. Read here: `reward.num_workers`, `reward.timeout_s`,
            `reward.load_timeout_s`, `reward.processes_per_worker`, `reward.custom_reward_function`,
            `reward.reward_manager`.
        rm_resource_pool: GPUs of a reward model; rule rewards need none.

    Raises:
        ConfigError: the reward function or manager cannot be loaded (the message names the path and what is there), or
            a reward model is asked for.
    """

    def __init__(self, config: Any, rm_resource_pool: Any = None) -> None:
        import ray
        from omegaconf import OmegaConf

        from rlflow.config.reward import RewardConfig

        if rm_resource_pool is not None or OmegaConf.select(config, "reward.reward_model.enable"):
            raise ConfigError(
                "reward.reward_model.enable=true cannot work: this version scores with reward functions only. "
                "Set reward.reward_model.enable=false and use reward.custom_reward_function"
            )
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
        worker: Any = ray.remote(RewardLoopWorker)
        run = uuid.uuid4().hex[:8]
        self._workers: list[Any] = [
            worker.options(
                name=f"reward_loop_worker_{i}_{run}",
                num_cpus=0,
                max_restarts=MAX_RESTARTS,
                max_concurrency=MAX_CONCURRENT_CALLS,
                scheduling_strategy="SPREAD",
            ).remote(config, spec, timeout_s, processes)
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
        except BaseException:
            self.shutdown()
            raise
        logger.info("%d reward workers score with %s", n_workers, spec.label)

    @property
    def reward_loop_worker_handles(self) -> list[Any]:
        """Actor handles for agent loops; `handle.compute_score.remote(RewardInput) -> Score | Invalid`."""
        return self._workers

    def status(self) -> list[dict[str, Any]]:
        """One dict per worker: its counters, or `{"dead": reason}`."""
        from ray.exceptions import RayActorError

        from rlflow.utils.errors import DeadlineError

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
