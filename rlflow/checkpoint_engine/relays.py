"""The `CheckpointEngineWorker`s of a set of replicas, called like one worker group.

Invariant: a relay lives on the node of its replica's server, and as long as the replica is managed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from rlflow.checkpoint_engine.worker import CheckpointEngineWorker
from rlflow.single_controller.base import WorkerContext
from rlflow.utils.device import DEVICE_ENV, get_device_name, get_visible_devices_keyword
from rlflow.utils.ray_utils import ray_await

# Copied from the server's process: which device it has, and where gloo listens.
_SERVER_ENV = (DEVICE_ENV, "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")


class Relays:
    """Starts, keeps and calls the relays."""

    def __init__(self, start_timeout_s: float) -> None:
        self._start_timeout_s = start_timeout_s
        self._actors: dict[int, tuple[Any, Any]] = {}  # replica rank -> (server it feeds, relay)

    def of(self, replica: Any) -> Any:
        """The relay of a replica; `KeyError` before `ensure`."""
        return self._actors[replica.replica_rank][1]

    async def ensure(self, replicas: Sequence[Any]) -> None:
        """Start a relay for each replica that has none, or whose server is a new one."""
        missing = []
        for replica in replicas:
            server, _ = self._actors.get(replica.replica_rank, (None, None))
            if server is not replica.server_handle:
                self.end(replica)
                missing.append(replica)
        for replica, actor in zip(missing, await asyncio.gather(*map(self._start, missing)), strict=True):
            self._actors[replica.replica_rank] = (replica.server_handle, actor)

    def end(self, replica: Any) -> None:
        """Stop the relay of a replica, if it has one."""
        import ray

        _, actor = self._actors.pop(replica.replica_rank, (None, None))
        if actor is not None:
            ray.kill(actor)

    async def execute(
        self, replicas: Sequence[Any], method: str, kwargs: dict[str, list[Any]], timeout_s: float
    ) -> list[Any]:
        """`method` of the engine of each relay, element i of every argument for replica i."""
        calls = []
        for place, replica in enumerate(replicas):
            mine = {key: values[place] for key, values in kwargs.items()}
            call = self.of(replica).execute_checkpoint_engine.remote(method, **mine)
            what = f"{method} of the weight receiver of rollout replica {replica.replica_rank}"
            calls.append(ray_await(call, what=what, timeout_s=timeout_s))
        return list(await asyncio.gather(*calls))

    async def _start(self, replica: Any) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = await ray_await(
            replica.server_handle.__ray_call__.remote(_place),
            what=f"the node of rollout replica {replica.replica_rank}",
            timeout_s=self._start_timeout_s,
        )
        actor: Any = ray.remote(CheckpointEngineWorker)
        return actor.options(
            num_cpus=0,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=place["node_id"], soft=False),
            runtime_env={"env_vars": place["env"]},
        ).remote(
            replica.config,
            replica.model_config,
            replica.server_handle,
            replica_rank=replica.replica_rank,
            context=WorkerContext.single(),
        )


def _place(_server: Any) -> dict[str, Any]:
    """Called in a server: its Ray node and the variables that a process beside it needs."""
    import ray

    env = {name: os.environ[name] for name in _SERVER_ENV if name in os.environ}
    env.setdefault(DEVICE_ENV, get_device_name())
    if (visible := get_visible_devices_keyword()) and visible in os.environ:
        env[visible] = os.environ[visible]
        env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    if len([node for node in ray.nodes() if node["Alive"]]) == 1:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody outside this machine takes part
    return {"node_id": ray.get_runtime_context().get_node_id(), "env": env}
