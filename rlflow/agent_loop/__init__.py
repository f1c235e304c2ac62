"""How a session unfolds: from one prompt to the rows that training reads.

    manager ──rows──> worker ──n sessions a prompt──> loop ──generate──> rollout servers
                        │ each finished session: reward, then its rows + tags into the TransferQueue
                        └ after the last session of a prompt: its marker becomes `finished` or `failure`

Write a loop of your own by subclassing `AgentLoopBase`; see `base.py`.
"""

from __future__ import annotations

from typing import Any

_EXPORTS = {
    "AgentLoopBase": "rlflow.agent_loop.base",
    "AgentLoopManagerTQ": "rlflow.agent_loop.manager",
    "AgentLoopMetrics": "rlflow.agent_loop.output",
    "AgentLoopOutput": "rlflow.agent_loop.output",
    "AgentLoopWorkerTQ": "rlflow.agent_loop.worker",
    "DictConfigWrap": "rlflow.agent_loop.base",
    "register": "rlflow.agent_loop.registry",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)
