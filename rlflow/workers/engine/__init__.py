"""Training engines: one model on one rank of a sharded group. Names load on first use."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "BaseEngine": "rlflow.workers.engine.base",
    "BaseEngineCtx": "rlflow.workers.engine.base",
    "EngineRegistry": "rlflow.workers.engine.registry",
    "FSDPEngine": "rlflow.workers.engine.fsdp.engine",
    "FSDPEngineWithLMHead": "rlflow.workers.engine.fsdp.engine",
    "FSDPEngineWithValueHead": "rlflow.workers.engine.fsdp.engine",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
