"""How the arguments of a call are split over workers and how their results become one.

A dispatch function `(group, *args, **kwargs)` answers with `Same` (every worker gets these) or `PerRank` (element i
goes to rank i); the answer's type says which, so that a list is never spread by accident. A plain pair `(args,
kwargs)` of lists, as the reference's functions return it, is read as `PerRank`. The one rule by shape is
ALL_TO_ALL's, kept for users' code: when every argument is a list of `world_size` items, they are spread; tuples never
are.

A collect function `(group, outputs)` gets the outputs of all workers in rank order: values of a blocking call, object
refs of a non-blocking one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rlflow import protocol
from rlflow.utils.errors import ContractError
from rlflow.utils.py_functional import DynamicEnum

if TYPE_CHECKING:
    from rlflow.single_controller.base.worker_group import WorkerGroup


@dataclass(frozen=True)
class Same:
    """Every worker is called with these arguments."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PerRank:
    """Worker i is called with element i of every argument.

    Attributes:
        args: one sequence of world_size items per positional argument.
        kwargs: the same per keyword argument.
        pad: rows that were added to the inputs; as many are dropped from the end of the collected result.
        mesh: the mesh whose topology decided the split, with its version; the workers refuse an outdated one.
    """

    args: tuple[Sequence[Any], ...] = ()
    kwargs: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    pad: int = 0
    mesh: tuple[str, int] | None = None

    def of(self, rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of one rank."""
        return tuple(arg[rank] for arg in self.args), {key: value[rank] for key, value in self.kwargs.items()}


Plan = Same | PerRank


def as_plan(answer: Any, world_size: int) -> Plan:
    """Check what a dispatch function returned. `ContractError` unless every sequence has world_size items."""
    if isinstance(answer, Same):
        return answer
    if not isinstance(answer, PerRank):
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping)):
            raise ContractError(
                f"a dispatch function returned {type(answer).__name__}; return Same(...), PerRank(...) or (args, "
                "kwargs)"
            )
        answer = PerRank(tuple(answer[0]), dict(answer[1]))
    for name, value in [*enumerate(answer.args), *answer.kwargs.items()]:
        if not isinstance(value, (list, tuple)) or len(value) != world_size:
            size = f" of {len(value)}" if hasattr(value, "__len__") else ""
            raise ContractError(
                f"argument {name!r} must hold one item per worker ({world_size}), got a {type(value).__name__}{size}"
            )
    return answer


class Dispatch(DynamicEnum):
    """Names of the predefined rules; see the table in `predefined`."""


class Execute(DynamicEnum):
    """Which workers run the method: ALL, or RANK_ZERO only (its single value is the result)."""


for _name in (
    "RANK_ZERO",
    "ONE_TO_ALL",
    "ALL_TO_ALL",
    "DP_COMPUTE",
    "DP_COMPUTE_PROTO",
    "DP_COMPUTE_PROTO_WITH_FUNC",
    "DP_COMPUTE_METRIC",
    "DIRECT_ROLLOUT_METHOD",
):
    Dispatch.register(_name)
for _name in ("ALL", "RANK_ZERO"):
    Execute.register(_name)


# ---- sending -----------------------------------------------------------------------------------------------------


def one_to_all(group: WorkerGroup, *args: Any, **kwargs: Any) -> Plan:
    """The same values to every worker."""
    return Same(args, kwargs)


def all_to_all(group: WorkerGroup, *args: Any, **kwargs: Any) -> Plan:
    """Spread the arguments when all of them are lists of world_size items, else send the same to every worker."""
    values = [*args, *kwargs.values()]
    if values and all(isinstance(value, list) and len(value) == group.world_size for value in values):
        return PerRank(args, kwargs)
    return Same(args, kwargs)


def per_rank(group: WorkerGroup, *args: Any, **kwargs: Any) -> Plan:
    """Every argument is a list or tuple with one item per worker."""
    return PerRank(args, kwargs)


def split_rows(group: WorkerGroup, *args: Any, **kwargs: Any) -> Plan:
    """Every argument is a carrier, split over all workers."""
    return split_by_parts(group, range(group.world_size), args, kwargs)


def split_by_parts(
    group: WorkerGroup, part_of_rank: Sequence[int], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> PerRank:
    """Carriers in equal parts for the ranks of a group.

    Args:
        group: who gets them.
        part_of_rank: for each rank, the number of its part; peers have the same and share one copy.
        args, kwargs: carriers. One that allows padding is padded (in a copy) to divide.

    Raises:
        ContractError: no carrier, rows that do not divide, or carriers whose padding differs.
    """
    count = max(part_of_rank) + 1
    pads = set()

    def spread(value: Any) -> list[Any]:
        padded, pad = protocol.pad_rows(value, count)
        pads.add(pad)
        with ThreadPoolExecutor(max_workers=min(count, 16)) as pool:
            shared = list(pool.map(group._share, protocol.chunk(padded, count)))
        return [shared[part] for part in part_of_rank]

    plan_args = tuple(spread(arg) for arg in args)
    plan_kwargs = {key: spread(value) for key, value in kwargs.items()}
    if len(pads) > 1:
        raise ContractError(
            f"the inputs of one call must share one length; padding them needs {sorted(pads)} rows each"
        )
    return PerRank(plan_args, plan_kwargs, pad=pads.pop() if pads else 0)


def split_rows_with_function(group: WorkerGroup, function: Any, *args: Any, **kwargs: Any) -> Plan:
    """The first argument is a plain function for all workers, the others are split over them."""
    if not inspect.isfunction(function):
        raise ContractError(f"the first argument must be a function, got a {type(function).__name__}")
    size = group.world_size
    parts = tuple(protocol.chunk(arg, size) for arg in args)
    return PerRank(([function] * size, *parts), {key: protocol.chunk(value, size) for key, value in kwargs.items()})


def split_over_mesh(mesh: str, group: WorkerGroup, *args: Any, **kwargs: Any) -> Plan:
    """Every argument is a carrier, split over the data-parallel ranks of `mesh`; peers of one rank share its part."""
    topology = group.topology(mesh)
    return replace(split_by_parts(group, topology.dp_ranks, args, kwargs), mesh=(mesh, topology.version))


def refuse_rank_zero(group: WorkerGroup, *args: Any, **kwargs: Any) -> Plan:
    """RANK_ZERO is no way to send arguments."""
    raise ContractError("Dispatch.RANK_ZERO sends nothing; use Dispatch.ALL_TO_ALL with execute_mode=Execute.RANK_ZERO")


def refuse_direct_rollout(group: WorkerGroup, *args: Any, **kwargs: Any) -> Plan:
    """Methods of this mode are called by a rollout server on its own worker, not by the controller."""
    raise NotImplementedError("a DIRECT_ROLLOUT_METHOD is called by the rollout server, not by the controller")


# ---- collecting --------------------------------------------------------------------------------------------------


def collect_all(group: WorkerGroup, output: Any) -> Any:
    """What the workers returned, as a list (of refs when non-blocking); the single value of RANK_ZERO."""
    return output


def collect_rows(group: WorkerGroup, output: list[Any]) -> Any:
    """Join what all workers returned."""
    return group._gather(output, join_parts)


def collect_from_mesh(mesh: str, group: WorkerGroup, output: list[Any]) -> Any:
    """Join what the collecting ranks of `mesh` returned, in the order of their data-parallel ranks."""
    return group._gather(output, partial(_pick_and_join, order=group.topology(mesh).collect_order))


def _pick_and_join(values: list[Any], order: Sequence[int]) -> Any:
    return join_parts([values[rank] for rank in order])


def join_parts(parts: list[Any]) -> Any:
    """Join results: carriers are concatenated, `None` from every worker is `None`.

    Metas of the queue may differ in `extra_info` (each rank's metrics), so equal keys are gathered into a list with one
    value a part, in order.
    """
    if all(part is None for part in parts):
        return None
    if not all(protocol.is_kv_meta(part) for part in parts):
        return protocol.concat(parts)
    from rlflow.single_controller.bridge import join_metas

    return join_metas(parts)


_PREDEFINED: dict[str, dict[str, Callable[..., Any]]] = {
    "RANK_ZERO": {"dispatch_fn": refuse_rank_zero, "collect_fn": collect_all},
    "ONE_TO_ALL": {"dispatch_fn": one_to_all, "collect_fn": collect_all},
    "ALL_TO_ALL": {"dispatch_fn": all_to_all, "collect_fn": collect_all},
    "DP_COMPUTE": {"dispatch_fn": per_rank, "collect_fn": collect_all},
    "DP_COMPUTE_PROTO": {"dispatch_fn": split_rows, "collect_fn": collect_rows},
    "DP_COMPUTE_PROTO_WITH_FUNC": {"dispatch_fn": split_rows_with_function, "collect_fn": collect_rows},
    "DP_COMPUTE_METRIC": {"dispatch_fn": split_rows, "collect_fn": collect_all},
    "DIRECT_ROLLOUT_METHOD": {"dispatch_fn": refuse_direct_rollout, "collect_fn": collect_all},
}


# With these a result belongs to a part of the input, so that rank 0 alone would drop the other parts.
_SPLITTING = ("DP_COMPUTE_", "MEGATRON_", "3D_PROTO")  # beginnings of their names


def check_execute_mode(execute_mode: Any, mode: Any) -> None:
    """`ContractError` unless it is an `Execute` member that goes together with the dispatch mode."""
    if not isinstance(execute_mode, Execute):
        raise ContractError(f"execute_mode must be an Execute member, got a {type(execute_mode).__name__}")
    splits = mesh_of(mode) is not None or (isinstance(mode, Dispatch) and mode.name.startswith(_SPLITTING))
    if execute_mode.name == "RANK_ZERO" and splits:
        raise ContractError(
            "Execute.RANK_ZERO runs the method on rank 0 only, which would get the first part of the rows and drop the "
            "others; use Dispatch.ONE_TO_ALL with it, or Execute.ALL"
        )


def check_mode(mode: Any) -> None:
    """`ContractError` unless `mode` is a `Dispatch` member or a dict with both functions."""
    if isinstance(mode, Dispatch):
        return
    if not isinstance(mode, Mapping):
        raise ContractError(f"dispatch_mode must be a Dispatch member or a dict, got a {type(mode).__name__}")
    missing = [key for key in ("dispatch_fn", "collect_fn") if not callable(mode.get(key))]
    if missing:
        raise ContractError(f"a dispatch_mode given as a dict needs callables under {missing}")


def get_predefined_dispatch_fn(mode: Dispatch) -> dict[str, Callable[..., Any]]:
    """`{"dispatch_fn", "collect_fn"}` of a `Dispatch` member; `ContractError` when it was registered without."""
    try:
        return dict(_PREDEFINED[mode.name])
    except KeyError:
        raise ContractError(f"{mode!r} has no functions; add it with register_dispatch_mode(name, ...)") from None


def get_predefined_execute_fn(mode: Execute) -> dict[str, str]:
    """`{"execute_fn_name"}`: the group's method that runs a call of this mode."""
    return {"execute_fn_name": {"ALL": "execute_all", "RANK_ZERO": "execute_rank_zero"}[mode.name]}


def register_dispatch_mode(name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> Dispatch:
    """Add `Dispatch.<NAME>`; `ValueError` when it exists. Processes that send calls must run this, workers too."""
    member = Dispatch.register(name)
    _PREDEFINED[member.name] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}
    return member


def update_dispatch_mode(mode: Dispatch, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> None:
    """Replace the functions of a member, for groups built from now on."""
    _PREDEFINED[mode.name] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Any]:
    """The mode that splits batches over the data-parallel ranks of a mesh; its short name is `mesh`."""
    return {
        "dispatch_fn": partial(split_over_mesh, mesh_name),
        "collect_fn": partial(collect_from_mesh, mesh_name),
        "mesh_name": mesh_name,
    }


mesh = make_nd_compute_dataproto_dispatch_fn


def mesh_of(mode: Any) -> str | None:
    """Name of the mesh a mode splits over, if it does."""
    return mode.get("mesh_name") if isinstance(mode, Mapping) else None
