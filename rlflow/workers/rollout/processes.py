"""The processes of a server, and their end.

A server that is stopped or stuck does not end itself, and the processes an engine started outlive the actor that
started them. So who is there is noted while the server answers, and everything is killed by the system, on its node.
A process id is used again by the system: one counts only with the time at which its process started.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import psutil

from rlflow.utils.ray_utils import ray_await

logger = logging.getLogger(__name__)

KILL_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ServerProcesses:
    """(pid, start time in unix seconds) of a server's processes on a node; the first is the actor's own."""

    node_id: str
    processes: list[tuple[int, float]] = field(default_factory=list)


def processes_here(_server: Any = None) -> ServerProcesses:
    """Called in a server: its process and everything below it."""
    import ray

    own = psutil.Process()
    found = []
    for process in (own, *own.children(recursive=True)):
        try:
            found.append((process.pid, process.create_time()))
        except psutil.NoSuchProcess:
            continue
    return ServerProcesses(ray.get_runtime_context().get_node_id(), found)


def kill_processes(processes: list[tuple[int, float]]) -> list[int]:
    """SIGKILL to those that are still there, and to what they started since; returns their pids."""
    doomed: dict[int, psutil.Process] = {}
    for pid, started in processes:
        try:
            process = psutil.Process(pid)
            if abs(process.create_time() - started) < 1.0:
                doomed |= {p.pid: p for p in (*process.children(recursive=True), process)}
        except psutil.NoSuchProcess:
            continue
    for process in doomed.values():
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(doomed.values(), timeout=5.0)
    return sorted(doomed)


async def kill_server(handle: Any, known: ServerProcesses | None) -> None:
    """End a server whatever state it is in. Returns when its processes are gone, or the node did not answer.

    Args:
        handle: its actor.
        known: its processes as it last told; None: Ray kills the actor alone.
    """
    import ray

    if known is not None:
        if known.node_id == ray.get_runtime_context().get_node_id():
            await asyncio.to_thread(kill_processes, known.processes)
        else:
            await _kill_elsewhere(known)
    ray.kill(handle)


async def _kill_elsewhere(known: ServerProcesses) -> None:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(kill_processes).options(
        num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(known.node_id, soft=False)
    )
    try:
        await ray_await(
            task.remote(known.processes), what="the end of a rollout server's processes", timeout_s=KILL_TIMEOUT_S
        )
    except (RayError, TimeoutError) as error:
        logger.warning("processes of a rollout server on node %s: %s", known.node_id, error)
