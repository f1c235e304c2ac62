"""Who wrote a field: the name of a process in lineage records."""

from __future__ import annotations

import os
import socket
import sys

_name: tuple[tuple[int, bool], str] | None = None


def this_process() -> str:
    """`"AgentLoopWorker pid 4711 on 10.0.0.3"`: actor name or class where there is one, process id and node."""
    global _name
    ray = sys.modules.get("ray")
    # Asked for with every put, and another answer only in a forked process or once Ray is there.
    key = (os.getpid(), ray is not None and ray.is_initialized())
    if _name is None or _name[0] != key:
        actor, node = _ray_names() if key[1] else ("", socket.gethostname())
        _name = (key, f"{actor + ' ' if actor else ''}pid {os.getpid()} on {node}")
    return _name[1]


def _ray_names() -> tuple[str, str]:
    """Actor name and node address in Ray."""
    import ray

    context = ray.get_runtime_context()
    actor = (context.get_actor_name() or "actor") if context.get_actor_id() else ""
    return actor, ray.util.get_node_ip_address()
