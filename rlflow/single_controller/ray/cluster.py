"""What the Ray cluster has: nodes, their totals and what is free. Read before a wait, shown when it fails."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.utils.device import cpu_cores


@dataclass(frozen=True)
class Node:
    """One living node of the cluster."""

    node_id: str
    ip: str
    total: Mapping[str, float]
    free: Mapping[str, float]

    def describe(self, names: Sequence[str]) -> str:
        """For example `10.0.0.1: CPU 3.5 free of 4, GPU 0 free of 8`."""
        parts = [f"{name} {self.free.get(name, 0):g} free of {self.total.get(name, 0):g}" for name in names]
        return f"{self.ip}: {', '.join(parts)}"


def nodes() -> list[Node]:
    """Living nodes, sorted by address."""
    import ray
    from ray._private.state import available_resources_per_node  # Ray has no public call for free resources by node

    free = available_resources_per_node()
    living = [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(living, key=lambda node: (address_key(node.ip), node.node_id))


def address_key(ip: str) -> tuple[Any, ...]:
    """Sort key of an address: numeric where it is one (10.0.0.9 before 10.0.0.10)."""
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:  # a host name
        return (99, 0, ip)
    return (address.version, int(address), ip)


def this_node_id() -> str:
    """Node this process runs on."""
    import ray

    return ray.get_runtime_context().get_node_id()


def cores_of(node_id: str, ray_cpus: float) -> int:
    """Cores of a node: counted where we run, else what Ray was told."""
    return cpu_cores() if node_id == this_node_id() else max(1, int(ray_cpus))


def describe(names: Sequence[str], among: Sequence[Node] | None = None) -> str:
    """One line a node with total and free amounts of the resources `names`."""
    found = nodes() if among is None else among
    return "\n".join(f"    there:  {node.describe(names)}" for node in found) or "    there:  no living node"
