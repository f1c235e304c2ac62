"""A rollout replica: one inference server (or one per node) over the devices of a slice of the workers.

Invariants
    - Handles are passed explicitly. Servers carry no global name, so two jobs never find each other's.
    - A server runs on the node of the workers whose weights it gets, and reserves no CPU of its own.
    - Every call to a server has a deadline, and its error names the replica.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Any

from rlflow.utils.errors import ConfigError, ContractError
from rlflow.utils.ray_utils import ray_await
from rlflow.workers.rollout.base import RolloutError, TokenOutput
from rlflow.workers.rollout.processes import ServerProcesses, kill_server, processes_here

__all__ = ["RolloutMode", "RolloutReplica", "RolloutReplicaRegistry", "TokenOutput", "get_rollout_replica_class"]

logger = logging.getLogger(__name__)

LAUNCH_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 300.0
_ALL_CALLS = 1_000_000
# A server that does not stop by itself is killed.
STOP_TIMEOUT_S = 5.0


class RolloutMode(Enum):
    """How a replica shares devices with training."""

    HYBRID = "hybrid"  # on the actor's devices; weights come from the actor in the same node
    COLOCATED = "colocated"  # beside training, with weights of its own (reward model, teacher)
    STANDALONE = "standalone"  # on devices of its own


class RolloutReplica(ABC):
    """One replica, seen from the controller.

    Args:
        replica_rank: number of this replica, unique in the run.
        config: `actor_rollout_ref.rollout`, resolved; of a reward model `reward.reward_model.rollout`.
        model_config: `actor_rollout_ref.model`, resolved; of a reward model one with its path.
        gpus_per_node: devices of a node.
        is_reward_model: its servers answer `score` instead of `generate`.
    """

    # An engine that cannot split a model over devices serves world_size 1, whatever the configured parallel sizes.
    supports_parallelism = True

    def __init__(
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ) -> None:
        self.replica_rank, self.config, self.model_config = replica_rank, config, model_config
        self.is_reward_model, self.is_teacher_model = is_reward_model, is_teacher_model
        self.name_suffix = f"_{name_suffix}" if name_suffix else ""
        self.world_size = self.world_size_for(config)
        self.gpus_per_replica_node = min(gpus_per_node, self.world_size)
        if self.world_size % self.gpus_per_replica_node:
            raise ConfigError(
                f"A rollout replica of {self.world_size} devices (tensor x data x pipeline parallel size) does not "
                f"divide into nodes of {self.gpus_per_replica_node}. Choose sizes whose product is a multiple of it."
            )
        self.nnodes = self.world_size // self.gpus_per_replica_node
        self.max_concurrency = max(1000, int(config.max_num_seqs) + 16)
        if config.get("full_determinism", False):
            # A round waits for a request of every session, so none may wait outside the server for its turn.
            self.max_concurrency = _ALL_CALLS
        # Set by the manager before launch: replicas that share this one's node and so its cores, and the device of a
        # pool of its own.
        self.replicas_on_node = 1
        self.device_name: str | None = None
        # How often its servers were started again.
        self.life = 0
        self.rollout_mode: RolloutMode | None = None
        self.workers: list[Any] = []
        self.servers: list[Any] = []
        self.pids: list[int] = []  # of the servers, for messages; an engine that does not know leaves it empty
        self.resource_pool: Any = None
        self._owns_pool = False
        self._worker_facts: list[Any] = []
        self._processes: list[ServerProcesses] = []
        self._server_handle: Any = None
        self._server_address: str | None = None

    @classmethod
    def world_size_for(cls, config: Any) -> int:
        """Devices of one replica."""
        if not cls.supports_parallelism:
            return 1
        return int(config.tensor_model_parallel_size * config.data_parallel_size * config.pipeline_model_parallel_size)

    @property
    def kind(self) -> str:
        """What it is called in messages."""
        return "reward model" if self.is_reward_model else "rollout"

    @property
    def server_id(self) -> str:
        """What the balancer calls its present servers."""
        return f"replica_{self.replica_rank}" + (f"_life_{self.life}" if self.life else "")

    @property
    def server_handle(self) -> Any:
        """The server that answers `generate`; `ContractError` before the launch."""
        if self._server_handle is None:
            raise ContractError(f"Rollout replica {self.replica_rank} has no server yet: initialise it first.")
        return self._server_handle

    @property
    def server_address(self) -> str | None:
        """host:port of the HTTP endpoint; None for an engine without one."""
        return self._server_address

    async def init_hybrid(self, worker_group: Any) -> None:
        """Serve on the devices of this replica's slice of the training workers; weights come from them."""
        self.rollout_mode = RolloutMode.HYBRID
        first = self.world_size * self.replica_rank
        self.workers = list(worker_group.workers[first : first + self.world_size])
        if len(self.workers) != self.world_size:
            raise ContractError(
                f"Rollout replica {self.replica_rank} needs workers {first}..{first + self.world_size - 1}; the group "
                f"has {len(worker_group.workers)}."
            )
        await self.launch_servers()

    async def init_hybrid_colocated(self, worker_group: Any, resource_pool: Any) -> None:
        """`init_hybrid` for an engine that also wants the placement groups of these workers."""
        self.resource_pool = resource_pool
        await self.init_hybrid(worker_group)

    async def init_colocated(self, resource_pool: Any) -> None:
        """Serve in the placement groups of a pool that training uses too, with weights of its own."""
        self.rollout_mode, self.resource_pool = RolloutMode.COLOCATED, resource_pool
        await self.launch_servers()

    async def init_standalone(self, resource_pool: Any = None) -> None:
        """Serve on devices of its own: those of `resource_pool`, or of a new pool `rollout_pool_{rank}`.

        A device of the pool has room for two processes, so that whoever receives weights for the server (a checkpoint
        engine) can run beside it.
        """
        if resource_pool is None:
            from rlflow.single_controller.ray import RayResourcePool

            role = "_reward" if self.is_reward_model else "_teacher" if self.is_teacher_model else ""
            device = self.device_name or "cpu"
            resource_pool = RayResourcePool(
                [self.gpus_per_replica_node] * self.nnodes,
                name_prefix=f"rollout{role}_pool_{self.replica_rank}{self.name_suffix}",
                max_colocate_count=2,
                device_name=device,
            )
            self._owns_pool = True
        self.rollout_mode, self.resource_pool = RolloutMode.STANDALONE, resource_pool
        await self.launch_servers()

    async def relaunch(self) -> None:
        """Start the servers again where they were, after `kill`. They have no weights that the trainer sent."""
        self.life += 1
        await self.launch_servers()

    @abstractmethod
    async def launch_servers(self) -> None:
        """Start the servers and set `servers`, `_server_handle` and `_server_address`."""

    async def wake_up(self) -> None:
        """Take memory back and serve."""
        await self._all("wake_up")

    async def sleep(self) -> None:
        """Let running requests end and free memory; later requests wait."""
        await self._all("sleep")

    async def abort_all_requests(self) -> list[dict[str, Any]]:
        """End all requests with what they have, and block new ones."""
        return await self._all("abort_all_requests")

    async def resume_generation(self) -> None:
        """Undo `abort_all_requests`' block."""
        await self._all("resume_generation")

    async def clear_kv_cache(self) -> None:
        """Forget keys and values that are kept for reuse."""
        await self._all("clear_kv_cache")

    async def release_kv_cache(self) -> None:
        """Free the cache, keep the weights."""
        await self._all("release_kv_cache")

    async def resume_kv_cache(self) -> None:
        """Undo `release_kv_cache`."""
        await self._all("resume_kv_cache")

    async def weight_version(self) -> int | None:
        """Version of the weights that the replica serves; None while they are not usable."""
        return (await self._all("weight_version"))[0]

    async def status(self) -> dict[str, Any]:
        """State and counts of the first server."""
        return (await self._all("status"))[0]

    async def ask_workers(self, function: Callable[[Any], Any]) -> list[Any]:
        """What `function(worker)` says in each of its workers; asked once, since later they may be busy training."""
        if not self._worker_facts:
            calls = [
                ray_await(worker.__ray_call__.remote(function), what="a worker's node", timeout_s=LAUNCH_TIMEOUT_S)
                for worker in self.workers
            ]
            self._worker_facts = list(await asyncio.gather(*calls))
        return self._worker_facts

    async def note_processes(self) -> None:
        """Ask the servers which processes are theirs, so that `kill` can end them when they do not answer."""
        calls = [
            ray_await(server.__ray_call__.remote(processes_here), what="a server's processes", timeout_s=CALL_TIMEOUT_S)
            for server in self.servers
        ]
        self._processes = list(await asyncio.gather(*calls))

    async def kill(self) -> None:
        """End the servers and all their processes at once, whatever they do; calls that wait for them fail."""
        servers, self.servers, self._server_handle = self.servers, [], None
        known, self._processes = self._processes, []
        ends = [kill_server(server, known[nth] if nth < len(known) else None) for nth, server in enumerate(servers)]
        await asyncio.shield(asyncio.gather(*ends))  # who is cancelled meanwhile must not leave half of it behind

    async def shutdown(self) -> None:
        """Stop the servers and end their processes. Errors of a dying process are ignored."""
        import ray
        from ray.exceptions import RayError

        servers, self.servers, self._server_handle = self.servers, [], None
        for server in servers:
            try:
                await ray_await(server.shutdown.remote(), what="a rollout server to stop", timeout_s=STOP_TIMEOUT_S)
            except (RayError, TimeoutError) as error:
                logger.debug("replica %d did not stop by itself: %s", self.replica_rank, error)
            ray.kill(server)
        if self._owns_pool:
            self.resource_pool.release()

    async def _all(self, method: str, *args: Any) -> list[Any]:
        from ray.exceptions import RayActorError

        what = f"{method} on {self.kind} replica {self.replica_rank}"
        calls = [
            ray_await(getattr(server, method).remote(*args), what=what, timeout_s=CALL_TIMEOUT_S)
            for server in self.servers
        ]
        try:
            return list(await asyncio.gather(*calls))
        except RayActorError as error:
            raise RolloutError(
                f"{self.kind.capitalize()} replica {self.replica_rank} died before or during {method}: {error}"
            ) from error


class RolloutReplicaRegistry:
    """Replica classes by `rollout.name`. Loaders import on first use, so that an engine's packages stay optional."""

    _loaders: dict[str, Callable[[], type[RolloutReplica]]] = {}

    @classmethod
    def register(cls, name: str, loader: Callable[[], type[RolloutReplica]]) -> None:
        """`loader()` returns the class."""
        cls._loaders[name] = loader

    @classmethod
    def get(cls, name: str) -> type[RolloutReplica]:
        """The class; `ConfigError` for an unknown name or an engine that is not part of this version."""
        try:
            loader = cls._loaders[name]
        except KeyError:
            raise ConfigError(
                f"rollout.name={name} is no rollout engine. Known: {', '.join(sorted(cls._loaders))}. Try hf"
            ) from None
        return loader()


def get_rollout_replica_class(name: str, disaggregation_enabled: bool = False) -> type[RolloutReplica]:
    """The replica class of an engine; `ConfigError` for prefill and decode on servers of their own."""
    if disaggregation_enabled:
        raise ConfigError(
            f"rollout.disaggregation.enabled=true: rollout.name={name} has no replicas with prefill and decode on "
            "servers of their own in this version. Set it to false."
        )
    return RolloutReplicaRegistry.get(name)


def _load_hf() -> type[RolloutReplica]:
    from rlflow.workers.rollout.hf.replica import HFReplica

    return HFReplica


def _load_vllm() -> type[RolloutReplica]:
    from rlflow.workers.rollout.vllm.replica import VLLMReplica

    return VLLMReplica


def _load_sglang() -> type[RolloutReplica]:
    from rlflow.workers.rollout.sglang.replica import SGLangReplica

    return SGLangReplica


def _absent(name: str) -> Callable[[], type[RolloutReplica]]:
    def refuse() -> type[RolloutReplica]:
        raise ConfigError(
            f"rollout.name={name} needs the extra {name!r} and its adapter, which is not in this version. Set "
            "rollout.name=hf (the embedded engine), or register a replica class of your own with "
            "RolloutReplicaRegistry.register."
        )

    return refuse


RolloutReplicaRegistry.register("hf", _load_hf)
RolloutReplicaRegistry.register("vllm", _load_vllm)
RolloutReplicaRegistry.register("sglang", _load_sglang)
RolloutReplicaRegistry.register("trtllm", _absent("trtllm"))
