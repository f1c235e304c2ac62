"""Which function scores: the user's (by path and name) or the built-in routing by `data_source`.

A `ScorerSpec` names the function and travels to the processes that run it; the function itself never does.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow.utils.errors import ConfigError


@dataclass(frozen=True)
class ScorerSpec:
    """`path` None: the built-in routing. `kwargs` are merged into each call and win over its own."""

    path: str | None = None
    name: str = "compute_score"
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How messages name the function."""
        return f"{self.name} of {self.path}" if self.path else "the built-in scorer"


def scorer_spec(config: Any) -> ScorerSpec:
    """The spec of `config.reward.custom_reward_function` (a resolved DictConfig); file paths are made absolute.

    Raises:
        ConfigError: the file does not exist.
    """
    from omegaconf import OmegaConf

    node = OmegaConf.select(config, "reward.custom_reward_function")
    path = OmegaConf.select(node, "path") if node is not None else None
    if not path:
        return ScorerSpec()
    kwargs = OmegaConf.select(node, "reward_kwargs")
    plain: Any = OmegaConf.to_container(kwargs, resolve=True) if OmegaConf.is_config(kwargs) else kwargs or {}
    name = OmegaConf.select(node, "name") or "compute_score"
    return ScorerSpec(_absolute(str(path)), str(name), {str(key): value for key, value in plain.items()})


def _absolute(path: str) -> str:
    if path.startswith("pkg://"):
        return path
    file = Path(path.removeprefix("file://")).expanduser().absolute()
    if not file.is_file():
        there = sorted(entry.name for entry in file.parent.glob("*.py")) if file.parent.is_dir() else []
        folder = f"{file.parent} holds {', '.join(there[:8]) or 'no .py file'}"
        raise ConfigError(
            f"reward.custom_reward_function.path={path} is no file. "
            f"{folder if file.parent.is_dir() else f'The folder {file.parent} does not exist'}. "
            "Give the path of a .py file (relative paths start at the working directory) or pkg://package.module"
        )
    return str(file)


def load_scorer(spec: ScorerSpec) -> Callable[..., Any]:
    """The function itself, with `spec.kwargs` bound so that they win over the call's keywords.

    Raises:
        ConfigError: no such file, function, or the module raised while it was imported.
    """
    if spec.path is None:
        from rlflow.rewards import default_compute_score

        return bind(default_compute_score, spec.kwargs)
    from rlflow.utils.import_utils import load_module

    try:
        module = load_module(spec.path)
    except (OSError, ImportError, RuntimeError) as error:
        raise ConfigError(f"reward.custom_reward_function.path={spec.path} cannot be imported: {error}") from error
    function = getattr(module, spec.name, None)
    if not callable(function):
        there = sorted(
            name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")
        )
        raise ConfigError(
            f"reward.custom_reward_function.name={spec.name} is not a function of {spec.path}; "
            f"it defines {', '.join(there) or 'no public function'}"
        )
    return bind(function, spec.kwargs)


def bind(function: Callable[..., Any], reward_kwargs: dict[str, Any]) -> Callable[..., Any]:
    """`function` with `reward_kwargs` winning over call keywords; coroutine functions stay recognisable as such."""
    if not reward_kwargs:
        return function
    if is_async(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            return await function(*args, **{**kwargs, **reward_kwargs})

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**kwargs, **reward_kwargs})

    return call


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` gives an awaitable: coroutine functions, partials of them, objects with one."""
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(type(function), "__call__", None)  # noqa: B004 -- the coroutine flag of the method is wanted
    return asyncio.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def get_custom_reward_fn(config: Any) -> Callable[..., Any] | None:
    """The user's reward function in this process, or None when the config names none. For tools and tests; the reward
    loop runs it in processes of its own.
    """
    spec = scorer_spec(config)
    return load_scorer(spec) if spec.path else None
