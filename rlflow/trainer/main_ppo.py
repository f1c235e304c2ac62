"""The main job: `python -m rlflow.trainer.main_ppo key=value ...`.

Order: unknown keys -> composition -> fit to the machine -> checks -> Ray -> `TaskRunner`. Whatever is wrong with the
configuration is said before Ray starts, all of it at once. However it ends, no process of the run stays behind; a
signal ends it within seconds (see `rlflow.trainer.interrupt`).
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from rlflow.trainer.follow import follow
from rlflow.trainer.interrupt import Interrupted, SignalGuard, guarded
from rlflow.utils.errors import ConfigError, DataError, DeadlineError, RlflowError
from rlflow.utils.processes import MARK_ENV
from rlflow.utils.ray_utils import cluster_to_join, ray_get
from rlflow.utils.redact import protect_process, redact_text, remember_arguments

logger = logging.getLogger(__name__)

# For the trackers and the journal of a run that is being interrupted; a part of interrupt.END_WITHIN_S.
STOP_DEADLINE_S = 3.0
# A controller that starts on a busy machine is not silent yet.
MIN_SILENCE_S = 60.0


def main(argv: list[str] | None = None) -> int:
    """Command line.

    Returns the exit code: 0 done, 1 the run failed, 2 the configuration cannot work, 128 + n ended by signal n.
    """
    try:
        with guarded(exits=True) as guard:
            try:
                return _main(sys.argv[1:] if argv is None else argv)
            except (KeyboardInterrupt, SystemExit):
                if guard is not None:
                    guard.check()  # Ray raises the first for what our handler raised, and its own handler the second
                raise
    except Interrupted as interrupted:
        _say(f"ended by {interrupted}")
        return interrupted.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return 130


def _main(overrides: list[str]) -> int:
    from rlflow.trainer.task_runner import configure_logging

    configure_logging()
    if "--plan" in overrides:
        from rlflow.trainer.plan.command import print_plan

        return print_plan(overrides)
    remember_arguments(overrides)
    try:
        config = prepare_config(overrides)
    except (ConfigError, DataError) as error:
        _say(f"error: {redact_text(str(error))}")
        return 2
    protect_process(config)
    try:
        run_ppo(config)
    except RlflowError as error:
        _say(f"error: {redact_text(str(error))}")
        return 1
    return 0


def prepare_config(overrides: list[str]) -> Any:
    """Compose, fit to the machine and check; prints notices."""
    if any(flag in overrides for flag in ("--help", "-h", "--cfg")):
        return _hydra_help()
    from rlflow.trainer.prepare import prepare_config as prepare

    return prepare(overrides, lambda text: _say(f"notice: {redact_text(text)}"))


def _hydra_help() -> Any:
    """Hydra's own flags (`--help`, `--cfg job`) work as usual; they print and exit."""
    import hydra

    hydra.main(config_path="pkg://rlflow.config", config_name="ppo_trainer", version_base=None)(lambda config: None)()
    raise SystemExit(0)


def run_ppo(config: Any, task_runner_class: Any = None) -> Any:
    """Run a checked configuration on Ray and wait for its end.

    Args:
        config: the composed `DictConfig`.
        task_runner_class: a Ray actor class with `run(config)`; the built-in runner when None. When it also has
            `events(after, timeout_s)`, they are shown in the terminal while it runs.

    Returns:
        What `run` returned. An already initialised Ray is used as it is and left running.

    Raises:
        RlflowError: the run failed; the message carries the cause.
    """
    import ray

    from rlflow.trainer.constants_ppo import get_ppo_ray_runtime_env

    with guarded() as guard:
        started_here = not ray.is_initialized()
        runner = None
        try:
            if started_here:
                _init_ray(config, guard)
            runner_class = task_runner_class or default_task_runner_class()
            if config.actor_rollout_ref.rollout.full_determinism and not started_here:
                # The Ray that is there has not our environment; what the runner starts inherits the runner's.
                runner_class = runner_class.options(runtime_env=get_ppo_ray_runtime_env(config))
            runner = runner_class.remote()
            silence_s = max(MIN_SILENCE_S, float(config.trainer.stall_timeout_s))
            result = follow(runner, runner.run.remote(config), guard, silence_s)
            if config.ray_kwargs.get("timeline_json_file"):
                ray.timeline(filename=config.ray_kwargs.timeline_json_file)
            return result
        except KeyboardInterrupt as interrupt:
            # Ray turns what a signal handler raises into a KeyboardInterrupt of its own.
            reason = Interrupted(guard.received) if guard is not None and guard.received else interrupt
            _stop(runner, reason)
            raise reason from None
        finally:
            try:
                if runner is not None:
                    ray.kill(runner)
            finally:
                if started_here:
                    ray.shutdown()


def _stop(runner: Any, interrupt: KeyboardInterrupt) -> None:
    """Let the runner finish its trackers and its journal, if it can do so at once."""
    import ray
    from ray.exceptions import RayError

    if not hasattr(runner, "stop") or not ray.is_initialized():
        return
    exit_code = interrupt.exit_code if isinstance(interrupt, Interrupted) else 130
    reason = f"ended by {interrupt}" if isinstance(interrupt, Interrupted) else "interrupted"
    try:
        ray_get(runner.stop.remote(reason, exit_code), what="the run's records to be closed", timeout_s=STOP_DEADLINE_S)
    except (RayError, DeadlineError) as error:
        logger.warning("trackers and journal may lack their last lines: %s", str(error).splitlines()[0])


def default_task_runner_class() -> Any:
    """`TaskRunner` as a Ray actor class that takes no whole CPU."""
    import ray

    from rlflow.trainer.task_runner import TaskRunner

    actor: Any = ray.remote
    return actor(num_cpus=0, max_concurrency=4)(TaskRunner)


def _init_ray(config: Any, guard: SignalGuard | None) -> None:
    import ray
    from omegaconf import OmegaConf

    from rlflow.trainer.constants_ppo import get_ppo_ray_runtime_env

    # On a busy machine Ray's agents need longer than its default of a few seconds to register.
    os.environ.setdefault("RAY_agent_register_timeout_ms", "120000")
    kwargs: Any = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    ours, users = get_ppo_ray_runtime_env(config), kwargs.pop("runtime_env", None) or {}
    env_vars = {**ours["env_vars"], **(users.get("env_vars") or {})}
    if MARK_ENV in os.environ:
        env_vars[MARK_ENV] = os.environ[MARK_ENV]  # also where Ray was running before and starts the workers
    kwargs["address"] = cluster_to_join(kwargs.get("address"))
    if kwargs["address"] != "local":
        kwargs.pop("num_cpus", None)  # the cluster has what it was started with
    else:
        kwargs.setdefault("include_dashboard", False)
    ray.init(runtime_env={**users, "env_vars": env_vars}, **kwargs)
    if guard is not None:
        guard.ray_started()


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
