"""Rollout: serving engines, their replicas, and the client that agent loops talk to."""

from __future__ import annotations

from typing import Any

__all__ = ["BaseRollout", "RolloutReplica", "get_rollout_class"]


def __getattr__(name: str) -> Any:
    # On use: the capability table is read before anything heavy is imported.
    if name == "RolloutReplica":
        from rlflow.workers.rollout.replica import RolloutReplica

        return RolloutReplica
    if name in ("BaseRollout", "get_rollout_class"):
        from rlflow.workers.rollout import base

        return getattr(base, name)
    raise AttributeError(name)
