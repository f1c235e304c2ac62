"""Scoring of sessions: managers, workers, and the killable processes in which scorers run."""

from __future__ import annotations

from typing import Any

_EXPORTS = {
    "Invalid": "rlflow.reward_loop.result",
    "RewardInput": "rlflow.reward_loop.result",
    "RewardLoopManager": "rlflow.reward_loop.manager",
    "RewardLoopWorker": "rlflow.reward_loop.worker",
    "RewardManagerBase": "rlflow.reward_loop.reward_manager",
    "RewardModelManager": "rlflow.reward_loop.reward_model",
    "Score": "rlflow.reward_loop.result",
    "get_reward_manager_cls": "rlflow.reward_loop.reward_manager",
    "register": "rlflow.reward_loop.reward_manager",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    # Lazy, because the scorer processes import this package and must start in tens of milliseconds.
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)
