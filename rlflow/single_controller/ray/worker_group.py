"""`RayWorkerGroup`: a worker group of Ray actors, one per bundle of a pool.

    start a host per bundle  ->  choose the rendezvous  ->  configure  ->  build the roles  ->  bind their methods

Invariants
    - Ranks follow the pool's bundles, which are sorted by node address; counts may differ between nodes.
    - Creation either gives a whole group or raises and leaves no process behind. So does `shutdown`.
    - A view (`spawn`) shares its parent's processes; ending either ends them.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import ray

from rlflow import protocol
from rlflow.single_controller.base.context import WorkerContext
from rlflow.single_controller.base.dispatch import PerRank, Plan
from rlflow.single_controller.base.worker_group import WorkerGroup
from rlflow.single_controller.errors import WorkerError
from rlflow.single_controller.ray import cluster
from rlflow.single_controller.ray.calls import RefWaiter
from rlflow.single_controller.ray.colocate import RayClassWithInitArgs
from rlflow.single_controller.ray.host import CallHeader
from rlflow.single_controller.ray.pool import Bundle, RayResourcePool, random_name
from rlflow.single_controller.ray.settings import Settings
from rlflow.utils.device import DEVICE_ENV, thread_environment
from rlflow.utils.errors import ConfigError, ContractError

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
CLOSE_TIMEOUT_S = 10.0
_LOOPBACK = "127.0.0.1"


@dataclass
class _Processes:
    """The actors of a group; one object, shared by the group and its views."""

    actors: list[Any]
    names: list[str]
    places: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False

    def where(self) -> tuple[str, ...]:
        return tuple(f"pid {place['pid']} on {place['ip']}" for place in self.places)


class RayWorkerGroup(WorkerGroup):
    """Workers on the bundles of a pool, called like one object.

    Args:
        resource_pool: where; None only with `worker_handles` or `worker_names`.
        ray_cls_with_init: what each process hosts: one class, or roles of `create_colocated_worker_cls` (their
            methods are reached through `spawn`).
        bin_pack: whether the processes of one node entry must be on one node.
        name_prefix: of the actors' names; None: random.
        detached: whether the processes outlive this one.
        worker_names, worker_handles: attach to the processes of a detached group; see `from_detached`.
        ray_wait_register_center_timeout: seconds for the processes to start and their roles to be built.
        kwargs:
            device_name: "cuda" or "cpu"; None: the pool's. use_gpu: false means no device is taken.
            master_addr, master_port: rendezvous, both or none. master_port_range: (low, high), the first free port.
            worker_env: further environment variables, set in each process before its roles are imported.
            profile_steps, worker_nsight_options: run the workers under nsys (cuda only).
            call_timeout_s: deadline of each call unless its method has one.

    Raises:
        ConfigError: arguments that contradict one another.
        DeadlineError: the pool was not placed, or the processes did not start, in time.
        WorkerError: a role's constructor raised.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_wait_register_center_timeout: float = START_TIMEOUT_S,
        **kwargs: Any,
    ) -> None:
        super().__init__(resource_pool)
        if ray_cls_with_init is None:
            raise ConfigError("ray_cls_with_init is needed: it says which methods the group has")
        self.ray_cls_with_init = ray_cls_with_init
        self.name_prefix = name_prefix or random_name()
        self._settings = Settings.read(kwargs, resource_pool, self.name_prefix)
        self._start_timeout_s = ray_wait_register_center_timeout
        self._role = next(iter(ray_cls_with_init.roles))
        self._master: tuple[str, int] = ("", 0)
        if resource_pool is None:
            self._processes = _attach(worker_names, worker_handles)
            self._world_size = len(self._processes.actors)
        else:
            if worker_names is not None or worker_handles is not None:
                raise ConfigError(
                    "a resource pool starts new workers, worker_names and worker_handles attach to old ones"
                )
            self._processes = _Processes([], [])
            self._create(resource_pool, bin_pack, detached)
        if len(ray_cls_with_init.roles) == 1:
            self._bind_worker_method(ray_cls_with_init.roles[self._role].cls)

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        **kwargs: Any,
    ) -> RayWorkerGroup:
        """Attach to running workers, in rank order. Handles keep processes alive; names find detached ones only."""
        return cls(
            None,
            ray_cls_with_init,
            name_prefix=name_prefix,
            worker_names=worker_names,
            worker_handles=worker_handles,
            **kwargs,
        )

    # ---- creation ----------------------------------------------------------------------------------------------

    def _create(self, pool: RayResourcePool, bin_pack: bool, detached: bool) -> None:
        pool.get_placement_groups("STRICT_PACK" if bin_pack else "PACK")
        bundles = pool.bundles()
        try:
            for bundle in bundles:
                self._launch(pool, bundle, detached)
            self._processes.places = self._ask("describe", [()] * len(bundles))
            self._master = self._choose_master(bundles)
            places = zip(self._contexts(bundles), self._process_envs(bundles), strict=True)
            self._ask("configure", [(context, env, self._settings.device_name) for context, env in places])
            for role, spec in self.ray_cls_with_init.roles.items():
                self._ask("build", [(role, spec.cls, spec.args, spec.kwargs)] * len(bundles), role)
        except BaseException:  # also an interrupt: no half of a group may stay behind
            self.shutdown()
            raise

    def _launch(self, pool: RayResourcePool, bundle: Bundle, detached: bool) -> None:
        spec = self.ray_cls_with_init
        name = f"{self.name_prefix}{spec.name}_{bundle.group_index}:{bundle.index}"
        options: dict[str, Any] = {"name": name}
        # Nothing else goes here: Ray starts the interpreter of a process with a runtime environment twice.
        if nsight := self._settings.nsight():
            options["runtime_env"] = nsight
        if detached or pool.detached:
            options["lifetime"] = "detached"
        actor = spec(
            bundle.group,
            bundle.index,
            use_gpu=self._settings.use_gpu,
            num_gpus=1 / pool.max_colocate_count,
            device_name=self._settings.device_name,
            options=options,
        )
        self._processes.actors.append(actor)
        self._processes.names.append(name)

    def _process_envs(self, bundles: Sequence[Bundle]) -> list[dict[str, str]]:
        """What the libraries of a process must find in its environment when they are loaded."""
        alive = {node.node_id: node for node in cluster.nodes()}
        on_node = Counter(bundle.node_id for bundle in bundles)
        common = {DEVICE_ENV: self._settings.device_name}
        if len(alive) == 1 and sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
            common["GLOO_SOCKET_IFNAME"] = "lo"  # nobody outside this machine takes part
        envs = []
        for bundle in bundles:
            cores = cluster.cores_of(bundle.node_id, alive[bundle.node_id].total.get("CPU", 1.0))
            # More threads than cores make the processes of a node spin against one another.
            threads = thread_environment(cores // on_node[bundle.node_id])
            envs.append({**common, **threads, **self._settings.worker_env})
        return envs

    def _choose_master(self, bundles: Sequence[Bundle]) -> tuple[str, int]:
        settings = self._settings
        if settings.master is not None:
            return settings.master
        address = _LOOPBACK if len({bundle.node_id for bundle in bundles}) == 1 else bundles[0].node_ip
        ref = self._processes.actors[0].rendezvous_port.remote(address, settings.master_port_range)
        return address, self._waiter("rendezvous_port", [0], "host")([ref], self._start_timeout_s)[0]

    def _contexts(self, bundles: Sequence[Bundle]) -> list[WorkerContext]:
        on_node = Counter(bundle.node_id for bundle in bundles)
        seen: Counter[str] = Counter()
        contexts = []
        for rank, bundle in enumerate(bundles):
            contexts.append(
                WorkerContext(
                    rank=rank,
                    world_size=len(bundles),
                    local_rank=seen[bundle.node_id],
                    local_world_size=on_node[bundle.node_id],
                    master_addr=self._master[0],
                    master_port=self._master[1],
                    device_index=seen[bundle.node_id],
                    group=self.name_prefix,
                )
            )
            seen[bundle.node_id] += 1
        return contexts

    def _ask(self, method: str, arguments: Sequence[tuple[Any, ...]], role: str = "host") -> list[Any]:
        """Call a method of every host itself, with the deadline of creation."""
        actors = self._processes.actors
        refs = [getattr(actor, method).remote(*args) for actor, args in zip(actors, arguments, strict=True)]
        return self._waiter(method, range(len(actors)), role)(refs, self._start_timeout_s)

    # ---- properties --------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[Any]:
        """Actor handles in rank order."""
        return list(self._processes.actors)

    @property
    def worker_names(self) -> list[str]:
        """Actor names in rank order."""
        return list(self._processes.names)

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [place["pid"] for place in self._processes.places]

    @property
    def master_address(self) -> str:
        """Host of rank 0's rendezvous."""
        return self._master[0]

    @property
    def master_port(self) -> int:
        """Port of rank 0's rendezvous."""
        return self._master[1]

    @property
    def worker_cls(self) -> type:
        """Class of this view's workers: where its methods declare what they read and write."""
        return self.ray_cls_with_init.roles[self._role].cls

    # ---- views -------------------------------------------------------------------------------------------------

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """One view per role: the same processes, the methods of that role.

        Raises:
            ContractError: a role that the processes do not host.
        """
        return {role: self._view(role) for role in prefix_set}

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make `group.<role>` the view of each role."""
        for role, view in self.spawn(prefix_set).items():
            setattr(self, role, view)

    def _view(self, role: str) -> RayWorkerGroup:
        roles = self.ray_cls_with_init.roles
        if role not in roles:
            raise ContractError(f"these processes host the roles {list(roles)}, not {role!r}")
        view = RayWorkerGroup.__new__(RayWorkerGroup)
        # A copy of this group's plain state: without bound methods, and with a topology of its own.
        shared = (
            "ray_cls_with_init",
            "name_prefix",
            "_settings",
            "_start_timeout_s",
            "_master",
            "_processes",
            "_world_size",
        )
        WorkerGroup.__init__(view, self.resource_pool)
        view.__dict__.update({name: getattr(self, name) for name in shared}, _role=role)
        view._bind_worker_method(roles[role].cls)
        return view

    # ---- calls -------------------------------------------------------------------------------------------------

    def _start(self, method: str, plan: Plan, ranks: Sequence[int]) -> list[Any]:
        if self._processes.ended:
            raise WorkerError(
                f"the worker group was shut down; {self._role}.{method} cannot run", -1, self._role, method, True
            )
        mesh, version = plan.mesh if isinstance(plan, PerRank) and plan.mesh else (None, 0)
        header = CallHeader(self._role, method, mesh, version)
        shown = f"{self._role}.{method}"
        refs = []
        for rank in ranks:
            args, kwargs = plan.of(rank) if isinstance(plan, PerRank) else (plan.args, plan.kwargs)
            refs.append(self._processes.actors[rank].call.options(name=shown).remote(header, *args, **kwargs))
        return CallRefs(refs, self._waiter(method, ranks))

    def _wait(self, refs: list[Any], method: str, ranks: Sequence[int], timeout_s: float | None) -> list[Any]:
        return self._waiter(method, ranks)(refs, timeout_s)

    def _gather(self, output: list[Any], function: Callable[[list[Any]], Any]) -> Any:
        if isinstance(output, CallRefs):
            return protocol.Future(output, function, fetch=output.waiter, timeout_s=output.waiter.timeout_s)
        return function(output)

    def _pick(self, output: list[Any], ranks: Sequence[int]) -> list[Any]:
        picked = super()._pick(output, ranks)
        if not isinstance(output, CallRefs):
            return picked
        waiter = output.waiter
        return CallRefs(picked, replace(waiter, ranks=tuple(waiter.ranks[rank] for rank in ranks)))

    def _share(self, value: Any) -> Any:
        # A batch goes to the object store once; peers of one data-parallel rank read the same copy.
        return ray.put(value) if protocol.is_tensordict(value) or protocol.is_data_proto(value) else value

    def _waiter(self, method: str, ranks: Sequence[int], role: str | None = None) -> RefWaiter:
        return RefWaiter(
            role or self._role, method, tuple(ranks), self._settings.call_timeout_s, self._processes.where()
        )

    # ---- end ---------------------------------------------------------------------------------------------------

    def shutdown(self, grace_s: float = CLOSE_TIMEOUT_S) -> None:
        """Close the roles and end the processes, of views too; returns when those on this node are gone.

        A worker that does not close within `grace_s` seconds is ended all the same. Calling it again does nothing.
        """
        processes = self._processes
        if processes.ended or not ray.is_initialized():
            return
        processes.ended = True
        ours = _local_processes(processes.places)
        closing = [actor.close.remote() for actor in processes.actors]
        if closing:
            _, hung = ray.wait(closing, num_returns=len(closing), timeout=grace_s)
            if hung:
                logger.warning("%d of %d workers did not close within %g s", len(hung), len(closing), grace_s)
        for actor in processes.actors:
            ray.kill(actor, no_restart=True)
        _, left = psutil.wait_procs(ours, timeout=CLOSE_TIMEOUT_S)
        for process in left:
            logger.warning("worker process %d outlived ray.kill, sending SIGKILL", process.pid)
            process.kill()
        psutil.wait_procs(left, timeout=CLOSE_TIMEOUT_S)


class CallRefs(list[Any]):
    """Object refs of a non-blocking call, in rank order; `get` waits for them with errors that name the rank."""

    def __init__(self, refs: Iterable[Any], waiter: RefWaiter) -> None:
        super().__init__(refs)
        self.waiter = waiter

    def get(self, timeout_s: float | None = None) -> list[Any]:
        """The values. `WorkerError` when a worker failed, `DeadlineError` when time is over."""
        return self.waiter(self, timeout_s)


def _attach(names: Sequence[str] | None, handles: Sequence[Any] | None) -> _Processes:
    if handles is None and names is None:
        raise ConfigError("without a resource pool, worker_names or worker_handles must say which workers to attach to")
    actors = list(handles) if handles is not None else [ray.get_actor(name) for name in names or []]
    attached = _Processes(actors, list(names or []))
    waiter = RefWaiter("host", "describe", tuple(range(len(actors))), START_TIMEOUT_S)
    attached.places = waiter([actor.describe.remote() for actor in actors])
    return attached


def _local_processes(places: Sequence[dict[str, Any]]) -> list[psutil.Process]:
    """Our processes on this node. Those of other nodes are left to Ray, which ends them with the actor."""
    here = cluster.this_node_id()
    found = []
    for place in places:
        if place["node_id"] == here:
            try:
                found.append(psutil.Process(place["pid"]))
            except psutil.NoSuchProcess:  # it died before
                continue
    return found
