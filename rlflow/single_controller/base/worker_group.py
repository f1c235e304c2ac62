"""`WorkerGroup`: many workers that are called like one object.

    call on the group  ->  dispatch (who gets which arguments)  ->  execute  ->  wait  ->  collect (one result)

This module knows how a call is planned and how topology is kept; a backend (Ray) knows how to start processes and to
run a planned call on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow import protocol
from rlflow.single_controller.base.decorator import registered_methods
from rlflow.single_controller.base.dispatch import (
    Dispatch,
    PerRank,
    Plan,
    Same,
    as_plan,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
)
from rlflow.single_controller.base.parallel import ParallelLayout
from rlflow.utils.errors import ContractError


class ResourcePool:
    """Processes by node: `[4, 8]` is 4 on one node and 8 on another.

    Args:
        process_on_nodes: number of processes of each node.
        max_colocate_count: worker processes that may share one device.
        n_gpus_per_node: devices of a node, for callers that size pools by it.
    """

    def __init__(
        self, process_on_nodes: Sequence[int] | None = None, max_colocate_count: int = 10, n_gpus_per_node: int = 8
    ) -> None:
        self._store = [int(count) for count in process_on_nodes or []]
        if any(count < 1 for count in self._store):
            raise ContractError(f"process_on_nodes={self._store}: every node of a pool needs at least one process")
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node

    @property
    def store(self) -> list[int]:
        """Processes of each node."""
        return self._store

    @property
    def world_size(self) -> int:
        """Processes of all nodes."""
        return sum(self._store)

    def __call__(self) -> list[int]:
        return self._store

    def add_node(self, process_count: int) -> None:
        """Add a node with that many processes."""
        self._store.append(int(process_count))

    def local_world_size_list(self) -> list[int]:
        """For each process, the number of processes on its node."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For each process, its place on its node."""
        return [place for count in self._store for place in range(count)]


class ClassWithInitArgs:
    """A class and the arguments of its construction, which happens later and elsewhere."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Any:
        return self.cls(*self.args, **self.kwargs)


@dataclass(frozen=True)
class MeshTopology:
    """Where the ranks of a group stand in one mesh.

    Attributes:
        dp_ranks: data-parallel rank of every rank.
        collect_order: the collecting ranks, sorted by data-parallel rank, so that joined rows keep their order.
        version: the workers' count of registrations of this mesh.
    """

    dp_ranks: tuple[int, ...]
    collect_order: tuple[int, ...]
    version: int

    @property
    def dp_size(self) -> int:
        """Number of parts a batch is split into."""
        return max(self.dp_ranks) + 1

    @classmethod
    def build(cls, mesh: str, places: Sequence[tuple[int, bool, int]]) -> MeshTopology:
        """From (dp_rank, is_collect, version) of every rank.

        Raises:
            ContractError: the parts of a batch would not come back exactly once, or workers differ in version.
        """
        collecting = sorted((dp, rank) for rank, (dp, is_collect, _) in enumerate(places) if is_collect)
        wanted = list(range(max(dp for dp, _, _ in places) + 1))
        if [dp for dp, _ in collecting] != wanted:
            raise ContractError(
                f"mesh {mesh!r} must collect from one rank of each data-parallel rank {wanted}, but collects from "
                f"(dp rank, rank) {collecting}"
            )
        versions = {version for _, _, version in places}
        if len(versions) > 1:
            raise ContractError(f"the workers are at different versions {sorted(versions)} of mesh {mesh!r}")
        return cls(tuple(dp for dp, _, _ in places), tuple(rank for _, rank in collecting), versions.pop())


class WorkerGroup:
    """Base of the backends. A backend sets `_world_size` and implements `_start` and `_wait`."""

    def __init__(self, resource_pool: ResourcePool | None = None) -> None:
        self.resource_pool = resource_pool
        self._world_size = resource_pool.world_size if resource_pool is not None else 0
        self._topologies: dict[str, MeshTopology] = {}
        self._layout: ParallelLayout | None = None

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._world_size

    # ---- for a backend to implement ----------------------------------------------------------------------------

    def _start(self, method: str, plan: Plan, ranks: Sequence[int]) -> list[Any]:
        """Start a planned call on some ranks; returns one ref each, without waiting."""
        raise NotImplementedError

    def _wait(self, refs: list[Any], method: str, ranks: Sequence[int], timeout_s: float | None) -> list[Any]:
        """Values of the refs; raises as soon as a worker fails."""
        raise NotImplementedError

    def _gather(self, output: list[Any], function: Callable[[list[Any]], Any]) -> Any:
        """`function(output)`, or a future of it while `output` still is refs."""
        if output and all(protocol.is_ref(item) for item in output):
            return protocol.Future(output, function)
        return function(output)

    def _pick(self, output: list[Any], ranks: Sequence[int]) -> list[Any]:
        """The items of some ranks, in that order."""
        return [output[rank] for rank in ranks]

    def _share(self, value: Any) -> Any:
        """A value that several workers get, in the form that is cheapest to send several times."""
        return value

    # ---- topology ----------------------------------------------------------------------------------------------

    def topology(self, mesh: str) -> MeshTopology:
        """Where the ranks stand in a mesh. Asked once, for all meshes of the workers; see `refresh_topology`.

        Raises:
            ContractError: some worker has not registered the mesh, or the workers contradict one another.
        """
        if mesh not in self._topologies:
            answers = self.execute_all_sync("_query_topology")
            lacking = [rank for rank, answer in enumerate(answers) if mesh not in answer]
            if lacking:
                raise ContractError(
                    f"mesh {mesh!r} is not registered on ranks {lacking} of {self.world_size}; known there: "
                    f"{sorted(answers[lacking[0]])}. Call init_model (or whatever registers it) first."
                )
            self._topologies = {
                name: MeshTopology.build(name, [answer[name] for answer in answers])
                for name in answers[0]
                if all(name in answer for answer in answers)
            }
        return self._topologies[mesh]

    def parallel_layout(self) -> ParallelLayout:
        """Where the ranks stand by tensor, context, data and pipeline parallelism. Asked once; see `refresh_topology`.

        Raises:
            ContractError: the workers contradict one another.
        """
        if self._layout is None:
            self._layout = ParallelLayout.build(self.execute_all_sync("get_parallel_info"))
        return self._layout

    def refresh_topology(self) -> None:
        """Forget what the workers said about their places; the next call asks again."""
        self._topologies = {}
        self._layout = None

    # ---- calls -------------------------------------------------------------------------------------------------

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Start a method on every worker; returns refs in rank order.

        When every argument is a list of world_size items, worker i gets their elements i (compatibility rule).
        """
        plan = get_predefined_dispatch_fn(Dispatch.ALL_TO_ALL)["dispatch_fn"](self, *args, **kwargs)
        return self._start(method_name, plan, range(self.world_size))

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`execute_all_async`, and wait for the values."""
        refs = self.execute_all_async(method_name, *args, **kwargs)
        return self._wait(refs, method_name, range(self.world_size), None)

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`execute_all_async`."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Start a method on rank 0 with the arguments as they are; returns its ref."""
        return self._start(method_name, Same(args, kwargs), [0])[0]

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """`execute_rank_zero_async`, and wait for the value."""
        return self._wait([self.execute_rank_zero_async(method_name, *args, **kwargs)], method_name, [0], None)[0]

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """`execute_rank_zero_async`."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    def _call(self, method: str, attributes: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Plan, run and collect one call of a registered method; see `register` for the attributes."""
        mode = attributes["dispatch_mode"]
        functions = get_predefined_dispatch_fn(mode) if isinstance(mode, Dispatch) else mode
        only_zero = get_predefined_execute_fn(attributes["execute_mode"])["execute_fn_name"] == "execute_rank_zero"
        if only_zero and isinstance(mode, Dispatch) and mode.name in ("ALL_TO_ALL", "RANK_ZERO"):
            functions = get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL)  # one receiver: nothing to spread
        if attributes["mesh"] is not None and attributes["reads"] is None:
            args, kwargs = _name_fields(args, kwargs)
        plan = as_plan(functions["dispatch_fn"](self, *args, **kwargs), self.world_size)
        ranks: Sequence[int] = [0] if only_zero else range(self.world_size)
        refs = self._start(method, plan, ranks)
        output = self._wait(refs, method, ranks, attributes.get("timeout_s")) if attributes["blocking"] else refs
        result = functions["collect_fn"](self, output[0] if only_zero else output)
        pad = plan.pad if isinstance(plan, PerRank) else 0
        return result if isinstance(result, list) else protocol.drop_rows(result, pad)

    def _bind_worker_method(self, cls: type, func_generator: Callable[..., Any] | None = None) -> list[str]:
        """Give the group a callable for every registered method of `cls`; returns their names.

        Args:
            cls: the workers' class.
            func_generator: `(group, name, attributes) -> callable`; None: `bound_method`.

        Raises:
            ContractError: a method is named like an attribute of the group.
        """
        names = []
        for name, attributes in registered_methods(cls):
            if hasattr(type(self), name):
                raise ContractError(
                    f"{cls.__name__}.{name} cannot be registered: a worker group has an attribute {name!r}"
                )
            setattr(self, name, (func_generator or bound_method)(self, name, attributes))
            names.append(name)
        return names


def _name_fields(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Metas that name no fields get the fields that all their rows share now.

    Without it each rank would look for itself, and one that comes late would also find what its peer has written.
    """

    def name(value: Any) -> Any:
        if not protocol.is_kv_meta(value) or value.fields is not None or not (len(value) and value.partition_id):
            return value
        import rlflow.transfer_queue as tq  # only groups whose rows lie in the queue need it

        fields = tq.kv_lineage(value.keys, value.partition_id).values()
        shared = sorted(set.intersection(*(set(of_row) for of_row in fields)))
        return type(value)(value.keys, value.tags, value.partition_id, shared, value.extra_info)

    return tuple(name(arg) for arg in args), {key: name(value) for key, value in kwargs.items()}


def bound_method(group: WorkerGroup, name: str, attributes: dict[str, Any]) -> Any:
    """A callable for one method; its type is named after the method, so that traces and profiles show it."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return group._call(name, attributes, *args, **kwargs)

    return type(name, (), {"__call__": call, "__slots__": ()})()
