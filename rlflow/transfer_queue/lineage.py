"""Who wrote a field: the name of a process in lineage records."""

from __future__ import annotations

import os
import socket
import sys

_name: tuple[int, str] | None = None


def this_process() -> str:
    """`"AgentLoopWorker pid 4711 on 10.0.0.3"`: actor name or class where there is one, process id and node."""
    global _name
    if _name is None or _name[0] != os.getpid():
        actor, node = _ray_names()
        _name = (os.getpid(), f"{actor + ' ' if actor else ''}pid {os.getpid()} on {node or socket.gethostname()}")
    return _name[1]


def _ray_names() -> tuple[str, str]:
    """Actor name and node address in Ray; empty outside of it."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return "", ""
    context = ray.get_runtime_context()
    actor = (context.get_actor_name() or "actor") if context.get_actor_id() else ""
    return actor, ray.util.get_node_ip_address()
