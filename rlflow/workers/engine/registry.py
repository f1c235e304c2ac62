"""Which engine class trains which kind of model by which backend on which device."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rlflow.utils.device import get_device_name, get_vendor
from rlflow.utils.errors import ConfigError, ContractError
from rlflow.workers.engine.base import BaseEngine

E = TypeVar("E", bound=type[BaseEngine])

# Modules that register the engines of this package, imported at the first look-up of their backend: an engine pulls in
# the model code of its backend, which a process without it must not need.
_HOMES = {"fsdp": "rlflow.workers.engine.fsdp.engine", "fsdp2": "rlflow.workers.engine.fsdp.engine"}

Key = str | tuple[str, str]


def _as_list(value: str | Sequence[str] | None) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


class EngineRegistry:
    """model_type -> backend -> device (or (device, vendor)) -> class."""

    _engines: dict[str, dict[str, dict[Key, type[BaseEngine]]]] = {}

    @classmethod
    def register(
        cls,
        model_type: str,
        backend: str | Sequence[str],
        device: str | Sequence[str] = "cuda",
        vendor: str | Sequence[str] | None = None,
    ) -> Callable[[E], E]:
        """Decorator: make an engine class selectable. `ContractError` for a taken key or a class of another base."""

        def decorator(engine: E) -> E:
            if not issubclass(engine, BaseEngine):
                raise ContractError(f"{engine.__name__} must derive from BaseEngine to be registered")
            keys: list[Key] = [(d, v) for d in _as_list(device) for v in _as_list(vendor)] or list(_as_list(device))
            for name in _as_list(backend):
                table = cls._engines.setdefault(model_type, {}).setdefault(name, {})
                for key in keys:
                    if table.get(key, engine) is not engine:
                        raise ContractError(f"{model_type}/{name}/{key} is already {table[key].__name__}")
                    table[key] = engine
            return engine

        return decorator

    @classmethod
    def get_engine_cls(cls, model_type: str, backend: str) -> type[BaseEngine]:
        """The class for this machine; RLFLOW_ENGINE_DEVICE and RLFLOW_ENGINE_VENDOR override what it is.

        Raises:
            ConfigError: (a ValueError) nothing fits; the message lists what exists.
        """
        if backend in _HOMES:
            importlib.import_module(_HOMES[backend])
        device = os.environ.get("RLFLOW_ENGINE_DEVICE") or get_device_name()
        vendor = os.environ.get("RLFLOW_ENGINE_VENDOR") or get_vendor()
        table = cls._engines.get(model_type, {}).get(backend, {})
        keys: list[Key] = [(device, vendor), device]
        if device == "cuda":
            keys.append(("cuda", "nvidia"))
        for key in keys:
            if key in table:
                return table[key]
        known = ", ".join(f"{m}/{b} on {d}" for m, bs in cls._engines.items() for b, ds in bs.items() for d in ds)
        raise ConfigError(
            f"no engine trains model_type={model_type!r} with strategy={backend!r} on {device} ({vendor}). "
            f"Registered: {known or 'none'}. Set actor_rollout_ref.actor.strategy=fsdp, or import the module that "
            "registers yours through actor_rollout_ref.model.external_lib."
        )

    @classmethod
    def new(cls, model_type: str, backend: str, *args: Any, **kwargs: Any) -> BaseEngine:
        """Build (not initialise) the engine."""
        return cls.get_engine_cls(model_type, backend)(*args, **kwargs)
