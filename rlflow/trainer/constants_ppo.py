"""Environment of all processes of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlflow.utils.determinism import DETERMINISM_ENV, determinism_environment
from rlflow.utils.device import thread_environment

# Ray chooses the thread count of a process, unless its group does.
_WAITING = {name: value for name, value in thread_environment(1).items() if name != "OMP_NUM_THREADS"}

PPO_RAY_RUNTIME_ENV: dict[str, Any] = {
    "env_vars": {
        "TOKENIZERS_PARALLELISM": "true",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NCCL_DEBUG": "WARN",
        # Waiting OpenMP threads sleep soon: trainer and rollout server take turns on the same cores.
        **_WAITING,
        "KMP_BLOCKTIME": "0",
    }
}
_DETERMINED = (DETERMINISM_ENV, "VLLM_BATCH_INVARIANT", "PYTHONHASHSEED")
FORWARDED = ("PYTHONPATH", "PYTHONHASHSEED", "RLFLOW_LOGGING_LEVEL", "VERL_LOGGING_LEVEL", "HF_HUB_OFFLINE")


def get_ppo_ray_runtime_env(config: Any = None) -> dict[str, Any]:
    """The runtime environment for `ray.init`; a variable the user has set is left alone (workers inherit it).

    Only the variables that make a deterministic run one (`_DETERMINED`) follow the configuration whatever is set.
    """
    env_vars = {name: value for name, value in PPO_RAY_RUNTIME_ENV["env_vars"].items() if name not in os.environ}
    env_vars |= {name: os.environ[name] for name in FORWARDED if name in os.environ}
    rollout = None if config is None else config.actor_rollout_ref.rollout
    if rollout is not None and rollout.full_determinism:
        ours = determinism_environment(int(rollout.seed))
        env_vars |= {name: value for name, value in ours.items() if name in _DETERMINED or name not in os.environ}
    return {"env_vars": env_vars}


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """This process's environment with these variables, for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
