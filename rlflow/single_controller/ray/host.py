"""The process of a worker group: one Ray actor that hosts named roles.

    configure(context)  ->  build(role, cls, args)  for each role  ->  call(role, method, args) ...

Invariants
    - The environment is complete before the first role's module is imported: Ray sets the visible devices, `configure`
      what libraries read when they load (thread counts), the rank and the rendezvous, and only then `build` receives
      the class. Nothing before loads such a library.
    - Calls run one after the other, in the order in which the controller made them, on the main thread: collectives of
      different ranks meet in the same order, and code that needs the main thread (signals) works.
    - An `async def` method is run to its end before the next call starts. All of them run on one event loop that
      lives as long as the process, so that what they keep (sessions, locks, tasks) stays usable; the loop only turns
      during such a call.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from typing import Any, NamedTuple

from rlflow.single_controller.base.context import WorkerContext, free_port
from rlflow.utils.errors import ContractError

logger = logging.getLogger(__name__)


class CallHeader(NamedTuple):
    """What a call is: method of a role, and the topology its arguments were split by."""

    role: str
    method: str
    mesh: str | None = None
    mesh_version: int = 0


class RoleHost:
    """Roles of one worker process; becomes a Ray actor in `RayClassWithInitArgs`."""

    def __init__(self) -> None:
        self._roles: dict[str, Any] = {}
        self._runner: asyncio.Runner | None = None

    def describe(self) -> dict[str, Any]:
        """Process, node and visible devices, once the process is up."""
        import ray

        return {
            "pid": os.getpid(),
            "ip": ray.util.get_node_ip_address(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }

    def rendezvous_port(self, address: str, port_range: tuple[int, int] | None) -> int:
        """A port that is free on this node, where rank 0 will listen."""
        return free_port(address, range(*port_range) if port_range else None)

    def configure(self, context: WorkerContext, env: dict[str, str], device_name: str) -> None:
        """Set the variables of the worker's place; before any role exists."""
        os.environ.update(env)
        values = context.to_env()
        if device_name != "cpu":
            values["LOCAL_RANK"] = str(_select_device(device_name))
        os.environ.update(values)

    def build(self, role: str, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Construct a role."""
        if role in self._roles:
            raise ContractError(f"role {role!r} exists in this process already")
        self._roles[role] = cls(*args, **kwargs)
        for worker in self._roles.values():
            # Every role sees the others of its process, those built later too.
            worker.fused_worker_dict = self._roles

    def call(self, header: CallHeader, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method of a role and return its result; a coroutine is run to its end."""
        if header.role not in self._roles:
            raise ContractError(f"this process hosts the roles {sorted(self._roles)}, not {header.role!r}")
        worker = self._roles[header.role]
        if header.mesh is not None:
            worker.check_mesh_version(header.mesh, header.mesh_version)
        result = getattr(worker, header.method)(*args, **kwargs)
        if inspect.iscoroutine(result):
            if self._runner is None:
                self._runner = asyncio.Runner()
            return self._runner.run(result)
        return result

    def close(self) -> None:
        """Let every role release what it holds, the last built first; a failure is logged and the next one closed."""
        for role, worker in reversed(self._roles.items()):
            try:
                worker.close()
            except Exception:  # noqa: BLE001 - the process ends anyway; the other roles still must be closed
                logger.exception("closing role %s failed", role)
        if self._runner is not None:
            self._runner.close()
            self._runner = None


def _select_device(device_name: str) -> int:
    """Index of this process's device among those it sees; selects it where it sees several.

    Ray normally shows a process its own device only, as number 0. With RAY_EXPERIMENTAL_NOSET_*_VISIBLE_DEVICES the
    process sees all, and Ray's accelerator id says which is its own.
    """
    prefix, suffix = "RAY_EXPERIMENTAL_NOSET_", "_VISIBLE_DEVICES"
    if not any(name.startswith(prefix) and name.endswith(suffix) and value for name, value in os.environ.items()):
        return 0
    import ray

    from rlflow.utils.device import PlatformRegistry

    platform = PlatformRegistry.get(device_name)
    ids = ray.get_runtime_context().get_accelerator_ids().get(platform.ray_resource, [])
    index = int(ids[0]) if ids else 0
    platform.device_module().set_device(index)
    return index
