"""Reward managers by name, and the one that a config asks for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from rlflow.reward_loop.reward_manager.base import RewardManagerBase

ManagerClass = TypeVar("ManagerClass", bound=type[RewardManagerBase])

_REGISTRY: dict[str, type[RewardManagerBase]] = {}
_BUILT_IN = {
    "naive": "rlflow.reward_loop.reward_manager.naive",
    "dapo": "rlflow.reward_loop.reward_manager.dapo",
}


def register(name: str) -> Callable[[ManagerClass], ManagerClass]:
    """Class decorator: `reward.reward_manager.name=<name>` uses this class."""

    def decorate(cls: ManagerClass) -> ManagerClass:
        known = _REGISTRY.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"the reward manager name {name!r} is taken by {known.__module__}.{known.__qualname__}")
        _REGISTRY[name] = cls
        return cls

    return decorate


def known_names() -> set[str]:
    """Names of the managers that are built in, or registered in this process."""
    return {*_REGISTRY, *_BUILT_IN}


def get_reward_manager_cls(name: str) -> type[RewardManagerBase]:
    """The class registered under `name`; `ValueError` lists the names there are."""
    if name not in _REGISTRY and name in _BUILT_IN:
        import_module(_BUILT_IN[name])
    if name not in _REGISTRY:
        known = ", ".join(sorted(known_names()))
        raise ValueError(
            f"reward.reward_manager.name={name!r} is unknown; known: {known}. A class of your own: "
            "reward.reward_manager.source=importlib with module.path, or @register in an imported module"
        )
    return _REGISTRY[name]


def resolve_reward_manager_cls(config: Any) -> type[RewardManagerBase]:
    """The manager class of `config.reward.reward_manager`: registered, or loaded from a file.

    Raises:
        ValueError: an unknown source or name.
        FileNotFoundError, AttributeError: no such file, or no such class in it.
    """
    from omegaconf import OmegaConf

    source = OmegaConf.select(config, "reward.reward_manager.source") or "register"
    name = OmegaConf.select(config, "reward.reward_manager.name") or "naive"
    if source == "register":
        return get_reward_manager_cls(name)
    if source == "importlib":
        from rlflow.utils.import_utils import load_extern_object

        path = OmegaConf.select(config, "reward.reward_manager.module.path")
        if not path:
            raise ValueError("reward.reward_manager.source=importlib needs reward.reward_manager.module.path")
        return load_extern_object(path, name)
    raise ValueError(f"reward.reward_manager.source={source!r} is unknown; use register or importlib")
