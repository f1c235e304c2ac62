"""The main job: `python -m rlflow.trainer.main_ppo key=value ...`.

Order: unknown keys -> composition -> fit to the machine -> checks -> Ray -> `TaskRunner`. Whatever is wrong with the
configuration is said before Ray starts, all of it at once.
"""

from __future__ import annotations

import logging
import signal
import sys
from typing import Any

from rlflow.utils.errors import ConfigError, DataError, RlflowError

logger = logging.getLogger(__name__)

POLL_DEADLINE_S = 20.0


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 1 the run failed, 2 the configuration cannot work."""
    from rlflow.trainer.task_runner import configure_logging

    configure_logging()
    overrides = sys.argv[1:] if argv is None else argv
    try:
        config = prepare_config(overrides)
    except (ConfigError, DataError) as error:
        _say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    try:
        run_ppo(config)
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except RlflowError as error:
        _say(f"error: {error}")
        return 1
    return 0


def prepare_config(overrides: list[str]) -> Any:
    """Compose, fit to the machine and check; prints notices."""
    if any(flag in overrides for flag in ("--help", "-h", "--cfg")):
        return _hydra_help()
    from rlflow.config.checks import validate_config
    from rlflow.config.machine import clamp_to_machine
    from rlflow.config.overrides import compose_config
    from rlflow.utils.device import auto_set_device, cpu_cores

    config = compose_config(overrides)
    auto_set_device(config)
    clamped = clamp_to_machine(config, cpu_cores())
    if clamped:
        _say(f"notice: {clamped}")
    for notice in validate_config(config):
        _say(f"notice: {notice}")
    return config


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

    started_here = not ray.is_initialized()
    if started_here:
        _init_ray(config)
    previous = _raise_on_sigterm()
    runner = None
    try:
        runner_class = task_runner_class or default_task_runner_class()
        runner = runner_class.remote()
        result = _wait(runner, runner.run.remote(config))
        if config.ray_kwargs.get("timeline_json_file"):
            ray.timeline(filename=config.ray_kwargs.timeline_json_file)
        return result
    finally:
        if runner is not None:
            ray.kill(runner)
        if started_here:
            ray.shutdown()
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)


def default_task_runner_class() -> Any:
    """`TaskRunner` as a Ray actor class that takes no whole CPU."""
    import ray

    from rlflow.trainer.task_runner import TaskRunner

    actor: Any = ray.remote
    return actor(num_cpus=0, max_concurrency=4)(TaskRunner)


def _init_ray(config: Any) -> None:
    import os

    import ray
    from omegaconf import OmegaConf

    from rlflow.trainer.constants_ppo import get_ppo_ray_runtime_env

    # On a busy machine Ray's agents need longer than its default of a few seconds to register.
    os.environ.setdefault("RAY_agent_register_timeout_ms", "120000")
    kwargs: Any = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    ours, users = get_ppo_ray_runtime_env(config), kwargs.pop("runtime_env", None) or {}
    env_vars = {**ours["env_vars"], **(users.get("env_vars") or {})}
    kwargs.setdefault("include_dashboard", False)
    ray.init(runtime_env={**users, "env_vars": env_vars}, **kwargs)


def _wait(runner: Any, result: Any) -> Any:
    """Show events until the run ends. The run's own stages have deadlines; this wait ends with them or with the
    actor.
    """
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    from rlflow.observe.live import LiveTable

    table = LiveTable()
    last = 0
    has_events = hasattr(runner, "events")
    try:
        while has_events:
            poll = runner.events.remote(last, POLL_DEADLINE_S / 2)
            done, _ = ray.wait([poll, result], num_returns=1, timeout=POLL_DEADLINE_S)
            if poll in done:
                last, events = ray.get(poll, timeout=POLL_DEADLINE_S)
                for event in events:
                    table.show(event)
            if result in ray.wait([result], timeout=0)[0]:
                break
        while not ray.wait([result], timeout=POLL_DEADLINE_S)[0]:
            pass  # a runner without events; its stages hold the deadlines, and its death ends this wait
        value = ray.get(result, timeout=POLL_DEADLINE_S)
        _, events = ray.get(runner.events.remote(last, 0), timeout=POLL_DEADLINE_S) if has_events else (0, [])
        for event in events:
            table.show(event)
        return value
    except RayTaskError as error:
        cause = error.cause if isinstance(getattr(error, "cause", None), RlflowError) else None
        if cause is not None:
            raise type(cause)(str(cause)) from error
        raise RlflowError(f"the run failed:\n{error}") from error
    except RayActorError as error:
        raise RlflowError(f"the controller process died: {error}") from error
    finally:
        table.close()


def _raise_on_sigterm() -> Any:
    """SIGTERM ends the run as Ctrl-C does: with clean-up. Only the main thread may install this."""
    import threading

    if threading.current_thread() is not threading.main_thread():
        return None

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    return signal.signal(signal.SIGTERM, interrupt)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before `main` could take care of it
        sys.exit(130)
