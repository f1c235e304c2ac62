"""Agent loops by name: built-in ones, `@register`ed ones, and those of a YAML file.

A row picks its loop by the dataset column `agent_name`; `rollout.agent.default_agent_loop` serves the others. A loop's
class is looked up once per worker, not once per session.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rlflow.utils.errors import ConfigError

LoopClass = TypeVar("LoopClass", bound=type)

_BUILT_IN = {"single_turn_agent": "rlflow.agent_loop.single_turn.SingleTurnAgentLoop"}
_REGISTRY: dict[str, dict[str, str]] = {}
_CLASSES: dict[str, type] = {}


@dataclass(frozen=True)
class LoopSpec:
    """A loop's class and the constructor keywords its YAML entry adds."""

    name: str
    cls: type
    kwargs: dict[str, Any] = field(default_factory=dict)


def register(name: str) -> Callable[[LoopClass], LoopClass]:
    """Class decorator: rows with `agent_name == name` run this loop.

    The module must be imported in the agent-loop workers: name it in the YAML file of
    `rollout.agent.agent_loop_config_path`, or in `actor_rollout_ref.model.external_lib`.
    """

    def decorate(cls: LoopClass) -> LoopClass:
        _REGISTRY[name] = {"_target_": f"{cls.__module__}.{cls.__qualname__}"}
        _CLASSES[name] = cls
        return cls

    return decorate


class LoopTable:
    """The loops one worker can run.

    Args:
        config_path: YAML list of `{name, _target_, ...constructor keywords}`, or None. An entry overrides a registered
            loop of the same name.

    Raises:
        ConfigError: the file or a class named in it cannot be loaded.
    """

    def __init__(self, config_path: str | None = None) -> None:
        self._specs: dict[str, LoopSpec] = {}
        self._entries = read_entries(config_path) if config_path else {}
        for name in self._entries:
            self.get(name)  # loads the module, so that its @register decorators run now

    def names(self) -> list[str]:
        """All names that `get` knows."""
        return sorted(known_names() | set(self._entries))

    def get(self, name: str) -> LoopSpec:
        """The loop called `name`; `ConfigError` lists the known ones."""
        if name not in self._specs:
            self._specs[name] = self._load(name)
        return self._specs[name]

    def _load(self, name: str) -> LoopSpec:
        from rlflow.utils.import_utils import load_class_from_fqn

        if name in self._entries:
            kwargs = dict(self._entries[name])
            target = kwargs.pop("_target_")
            return LoopSpec(name, load_class_from_fqn(target, f"agent loop {name!r}"), kwargs)
        if name in _CLASSES:
            return LoopSpec(name, _CLASSES[name])
        if name in _BUILT_IN:
            return LoopSpec(name, load_class_from_fqn(_BUILT_IN[name], f"agent loop {name!r}"))
        raise ConfigError(
            f"agent loop {name!r} is unknown; known: {', '.join(self.names())}. It comes from the agent_name column or "
            "rollout.agent.default_agent_loop; register your own with @register and name its module in "
            "rollout.agent.agent_loop_config_path"
        )


def known_names() -> set[str]:
    """Names of the loops that are built in, or registered in this process."""
    return {*_BUILT_IN, *_REGISTRY}


def read_entries(config_path: str) -> dict[str, dict[str, Any]]:
    """Name -> `{_target_, ...constructor keywords}` of the loops of a YAML file.

    Raises:
        ConfigError: the file cannot be read, or an entry lacks name or _target_.
        FileNotFoundError: there is no such file.
    """
    from omegaconf import OmegaConf
    from yaml import YAMLError

    path = resolve_config_path(config_path)
    try:
        entries = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (YAMLError, OSError) as error:
        raise ConfigError(f"rollout.agent.agent_loop_config_path={path} cannot be read: {error}") from error
    if not isinstance(entries, list):
        raise ConfigError(f"{path} must be a YAML list of {{name, _target_, ...}}, got a {type(entries).__name__}")
    table: dict[str, dict[str, Any]] = {}
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict) or not {"name", "_target_"} <= set(entry):
            raise ConfigError(f"{path}: entry {i} needs the keys name and _target_, got {entry!r}")
        named = {str(key): value for key, value in entry.items()}
        table[str(named.pop("name"))] = named
    return table


def resolve_config_path(config_path: str) -> Path:
    """Where a config file lies: as given when absolute, else under the working directory, the project that contains the
    installed package, or the package itself, in this order.

    Raises:
        ConfigError: the path leaves those folders through `..`.
        FileNotFoundError: it lies in none of them.
    """
    path = Path(config_path).expanduser()
    if path.is_absolute():
        if not path.is_file():
            raise FileNotFoundError(f"no file at {path}")
        return path
    package = Path(__file__).resolve().parents[1]
    roots = [Path.cwd(), package.parent, package]
    inside = [(root.resolve(), (root / path).resolve()) for root in roots]
    inside = [(root, file) for root, file in inside if file.is_relative_to(root)]
    if not inside:
        raise ConfigError(f"{config_path} leaves the folders it may lie in; give an absolute path")
    for _, file in inside:
        if file.is_file():
            return file
    raise FileNotFoundError(f"no file {config_path} under {', '.join(str(root) for root, _ in inside)}")
