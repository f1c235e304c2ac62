"""Resource pools: groups of bundles (a device, or a share of the CPUs) that worker groups are placed on.

Invariants
    - Placement groups are always listed in the order of their nodes' addresses, so that a rank keeps its node across
      restarts (sharded checkpoints may lie on local disks) and a slice of a pool means the same to everyone.
    - A request that can never fit fails at once; one that may fit later waits, but not longer than its deadline. Both
      say what was asked and what the cluster has.
    - On CPU a bundle is bookkeeping: it takes a fraction, at most half of what is free, so that pools and ordinary
      tasks fit on two cores.
"""

from __future__ import annotations

import functools
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from rlflow.single_controller.base.worker_group import ResourcePool
from rlflow.single_controller.ray import cluster
from rlflow.utils.device import get_resource_name
from rlflow.utils.errors import ConfigError, ContractError, DeadlineError

PLACEMENT_TIMEOUT_S = 60.0
_TINY = 1e-4  # Ray's smallest amount of a resource


@dataclass(frozen=True)
class Bundle:
    """One place for a worker process.

    Attributes:
        group: placement group.
        group_index: its place among the pool's groups, sorted by address.
        index: bundle index in the group.
        node_id: node of the bundle.
        node_ip: its address.
    """

    group: PlacementGroup
    group_index: int
    index: int
    node_id: str
    node_ip: str


class RayResourcePool(ResourcePool):
    """Bundles on the nodes of a Ray cluster; nothing is reserved before `get_placement_groups`.

    Args:
        process_on_nodes: number of processes of each node.
        use_gpu: whether a bundle holds a device; false means device "cpu".
        name_prefix: name of the pool; None: random.
        max_colocate_count: worker processes that may share one bundle; each gets that fraction of its device.
        detached: whether the reservation outlives this process.
        accelerator_type: Ray's name of a device type that every bundle must be on.
        device_name: "cuda" or "cpu"; None: by `use_gpu`.
        placement_timeout_s: seconds to wait for the reservation.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
        *,
        device_name: str | None = None,
        placement_timeout_s: float = PLACEMENT_TIMEOUT_S,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.device_name = device_name or ("cuda" if use_gpu else "cpu")
        self.use_gpu = self.device_name != "cpu"
        self.name_prefix = name_prefix or random_name()
        self.detached = detached
        self.accelerator_type = accelerator_type
        self.placement_timeout_s = placement_timeout_s
        self._groups: list[PlacementGroup] | None = None

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str | None = None
    ) -> list[PlacementGroup]:
        """The pool's placement groups, one a node, sorted by address; reserved at the first call.

        Raises:
            ConfigError: no node, or not enough nodes, could ever hold a group.
            ContractError: another device than the pool's is asked for.
            DeadlineError: the resources did not become free in time; what was reserved is given back.
        """
        if device_name is not None and device_name != self.device_name:
            raise ContractError(f"pool {self.name_prefix} is for device {self.device_name!r}, not {device_name!r}")
        if self._groups is None:
            self._groups = self._reserve(strategy, name or self.name_prefix)
        return self._groups

    def bundles(self) -> list[Bundle]:
        """Places of the ranks 0 .. world_size - 1."""
        return list_bundles(self.get_placement_groups())

    def release(self) -> None:
        """Give the reservation back; processes still on it are ended by Ray."""
        for group in self._groups or []:
            remove_placement_group(group)
        self._groups = None

    def bundle_request(self, free_cpus: float, processes: int) -> dict[str, float]:
        """Resources of one bundle where `processes` of them go to a node with `free_cpus`."""
        cpu = max(_TINY, min(1.0, int(free_cpus / (2 * processes) / _TINY) * _TINY))
        request = {"CPU": round(cpu, 4)}
        if self.use_gpu:
            request[get_resource_name(self.device_name)] = 1.0
        if self.accelerator_type:
            request[self.accelerator_type] = _TINY
        return request

    def _target_nodes(self, strategy: str, found: Sequence[cluster.Node]) -> list[str | None]:
        """The node that each group should be on, if it has room.

        Devices are counted by node, so groups of devices find their nodes. Bundles of CPU are small: Ray would put the
        processes of several nodes on one.
        """
        if self.use_gpu or strategy != "STRICT_PACK":  # Ray takes the wish of strictly packed groups only
            return [None] * len(self._store)
        return [found[i % len(found)].node_id for i in range(len(self._store))]

    def _requests(self, targets: Sequence[str | None], found: Sequence[cluster.Node]) -> list[list[dict[str, float]]]:
        """The bundles of each group. Groups of one target share half of what is free there."""
        free = {node.node_id: node.free.get("CPU", 0.0) for node in found}
        processes: Counter[str | None] = Counter()
        for count, target in zip(self._store, targets, strict=True):
            processes[target] += count
        requests = []
        for count, target in zip(self._store, targets, strict=True):
            if target is None:
                bundle = self.bundle_request(max(free.values(), default=0.0), count)
            else:
                bundle = self.bundle_request(free[target], processes[target])
            requests.append([bundle] * count)
        return requests

    def _reserve(self, strategy: str, name: str) -> list[PlacementGroup]:
        found = cluster.nodes()
        check_fits(self, found, one_node_each=strategy.startswith("STRICT"))
        targets = self._target_nodes(strategy, found)
        requests = self._requests(targets, found)
        suffix = secrets.token_hex(3)
        groups = [
            placement_group(
                bundles=bundles,
                strategy=strategy,
                name=f"{name}_{suffix}_{i}",
                lifetime="detached" if self.detached else None,
                _soft_target_node_id=target,
            )
            for i, (bundles, target) in enumerate(zip(requests, targets, strict=True))
        ]
        for group, bundles in zip(groups, requests, strict=True):
            if not group.wait(self.placement_timeout_s):
                for other in groups:
                    remove_placement_group(other)
                names = list(bundles[0])
                raise DeadlineError(
                    f"Resource pool {self.name_prefix!r} was not placed within {self.placement_timeout_s:g} s.\n"
                    f"    asked:  {len(bundles)} x {bundles[0]} on one node ({strategy}; pool {self._store})\n"
                    f"{cluster.describe(names)}\n"
                    "    try:    end what holds the resources, ask for fewer processes, or raise placement_timeout_s"
                )
        groups = sort_placement_groups(groups)
        self._store = [group.bundle_count for group in groups]
        return groups


def random_name() -> str:
    """Six characters."""
    return secrets.token_hex(3)


def check_fits(pool: RayResourcePool, found: Sequence[cluster.Node], one_node_each: bool = True) -> None:
    """`ConfigError` when the cluster, even if idle, cannot hold the pool.

    With `one_node_each` every count of `pool.store` must find one node for all its processes.
    """
    if not found:
        raise ConfigError("the Ray cluster has no living node")
    if not pool.use_gpu:
        return
    name = get_resource_name(pool.device_name)
    slots = tuple(sorted(int(node.total.get(name, 0)) for node in found))
    wanted = tuple(sorted(pool.store, reverse=True))
    if not (_fit(wanted, slots) if one_node_each else sum(wanted) <= sum(slots)):
        raise ConfigError(
            f"resource pool {pool.name_prefix!r} cannot fit this cluster.\n"
            f"    asked:  {sum(pool.store)} {name} as {pool.store} by node\n"
            f"{cluster.describe([name], found)}\n"
            "    try:    trainer.nnodes and trainer.n_gpus_per_node that the nodes have, or trainer.device=cpu"
        )


@functools.cache
def _fit(counts: tuple[int, ...], slots: tuple[int, ...]) -> bool:
    """Whether every count (descending) finds one of the slots (ascending) with room for all of it."""
    if not counts:
        return True
    if sum(counts) > sum(slots):
        return False
    # Slots of one size are alike, and the tightest first finds the usual fits without a search.
    for size in sorted({slot for slot in slots if slot >= counts[0]}):
        left = list(slots)
        left[left.index(size)] -= counts[0]
        if _fit(counts[1:], tuple(sorted(left))):
            return True
    return False


def sort_placement_groups(groups: Sequence[PlacementGroup]) -> list[PlacementGroup]:
    """Placed groups by the address of their node; those of one node keep their order."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def key(group: PlacementGroup) -> tuple[Any, ...]:
        node_id = placement_group_table(group)["bundles_to_node_id"][0]
        return (*cluster.address_key(addresses[node_id]), node_id)

    return sorted(groups, key=key)


def list_bundles(groups: Sequence[PlacementGroup]) -> list[Bundle]:
    """Bundles of placed groups, in order."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    found = []
    for group_index, group in enumerate(groups):
        where = placement_group_table(group)["bundles_to_node_id"]
        for index in range(group.bundle_count):
            found.append(Bundle(group, group_index, index, where[index], addresses[where[index]]))
    return found


class SubRayResourcePool(RayResourcePool):
    """`subgroup_world_size` consecutive bundles of another pool, from `start_bundle_index`, counted over all nodes."""

    def __init__(
        self,
        placement_groups: Sequence[PlacementGroup],
        start_bundle_index: int,
        subgroup_world_size: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._groups = list(placement_groups)
        self.start_bundle_index = start_bundle_index
        self.subgroup_world_size = subgroup_world_size

    @property
    def world_size(self) -> int:
        """Number of bundles in the slice."""
        return self.subgroup_world_size

    def bundles(self) -> list[Bundle]:
        """Places of the ranks of the slice."""
        start = self.start_bundle_index
        return super().bundles()[start : start + self.subgroup_world_size]

    def release(self) -> None:
        """Nothing: the reservation belongs to the whole pool."""


def split_resource_pool(pool: RayResourcePool, split_size: int | Sequence[int]) -> list[SubRayResourcePool]:
    """Cut a pool (or a slice of one) into slices of the given sizes, or of `split_size` bundles each.

    Raises:
        ContractError: the sizes do not add up to the pool.
    """
    size = pool.world_size
    if isinstance(split_size, int):
        sizes = [split_size] * (size // split_size) if split_size > 0 else []
    else:
        sizes = list(split_size)
    if sum(sizes) != size or any(part < 1 for part in sizes):
        raise ContractError(
            f"a pool of {size} processes cannot be split into {split_size}; the parts must add up to it"
        )
    groups = pool.get_placement_groups()
    start = pool.start_bundle_index if isinstance(pool, SubRayResourcePool) else 0
    parts: list[SubRayResourcePool] = []
    for part in sizes:
        parts.append(
            SubRayResourcePool(
                groups,
                start,
                part,
                process_on_nodes=pool.store,
                device_name=pool.device_name,
                name_prefix=f"{pool.name_prefix}_split_{len(parts)}",
                max_colocate_count=pool.max_colocate_count,
                detached=pool.detached,
                accelerator_type=pool.accelerator_type,
                placement_timeout_s=pool.placement_timeout_s,
            )
        )
        start += part
    return parts


def merge_resource_pool(first: RayResourcePool, second: RayResourcePool) -> RayResourcePool:
    """A pool over the bundles of two; `ContractError` unless they agree in device, colocation and lifetime."""
    if isinstance(first, SubRayResourcePool) or isinstance(second, SubRayResourcePool):
        raise ContractError("slices of a pool cannot be merged; merge the whole pools and split the result")
    for name in ("device_name", "max_colocate_count", "n_gpus_per_node", "detached"):
        if getattr(first, name) != getattr(second, name):
            raise ContractError(f"pools differ in {name}: {getattr(first, name)!r} and {getattr(second, name)!r}")
    merged = RayResourcePool(
        [*first.store, *second.store],
        name_prefix=f"{first.name_prefix}_{second.name_prefix}",
        max_colocate_count=first.max_colocate_count,
        detached=first.detached,
        device_name=first.device_name,
        placement_timeout_s=first.placement_timeout_s,
    )
    merged._groups = sort_placement_groups([*first.get_placement_groups(), *second.get_placement_groups()])
    return merged


@dataclass
class ResourcePoolManager:
    """The pools of a run and which role lives on which.

    Args:
        resource_pool_spec: pool name -> processes of each node.
        mapping: role -> pool name.
        max_colocate_count: worker processes that may share one device.
        device_name: "cuda" or "cpu".
        placement_timeout_s: seconds to wait for each reservation.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Any, str]
    max_colocate_count: int = 3
    device_name: str = "cuda"
    placement_timeout_s: float = PLACEMENT_TIMEOUT_S
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Make the pools and check that the cluster can hold them all together; reserves nothing yet.

        Raises:
            ConfigError: a role is mapped to no pool, or the devices are not there.
        """
        for role, pool_name in self.mapping.items():
            if pool_name not in self.resource_pool_spec:
                raise ConfigError(
                    f"role {role} is mapped to pool {pool_name!r}; there is {list(self.resource_pool_spec)}"
                )
        for name, process_on_nodes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes,
                name_prefix=name,
                max_colocate_count=self.max_colocate_count,
                device_name=self.device_name,
                placement_timeout_s=self.placement_timeout_s,
            )
        together = [count for pool in self.resource_pool_dict.values() for count in pool.store]
        names = "+".join(self.resource_pool_dict)
        check_fits(RayResourcePool(together, name_prefix=names, device_name=self.device_name), cluster.nodes())

    def get_resource_pool(self, role: Any) -> RayResourcePool:
        """The pool of a role; `ConfigError` when it has none."""
        if role not in self.mapping:
            raise ConfigError(f"role {role} has no resource pool; mapped are {list(self.mapping)}")
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Processes (one a device) of all pools."""
        return sum(sum(process_on_nodes) for process_on_nodes in self.resource_pool_spec.values())

    def shutdown(self) -> None:
        """Give all reservations back."""
        for pool in self.resource_pool_dict.values():
            pool.release()
