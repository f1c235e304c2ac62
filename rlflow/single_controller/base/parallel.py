"""Modes named after a model's parallel layout, for any worker group: aliases of mesh dispatch.

Ranks stand in a grid of tensor (T), context (C), data (D) and pipeline (P) parallel places, which every worker tells by
`get_parallel_info()`. A mode says which part of the input a place gets, and which places are collected:

    mode                              part of a place                     collected, one per part
    MEGATRON_COMPUTE, ..._PROTO       dp of D                             tp 0, cp 0, last pp
    MEGATRON_PP_AS_DP, ..._PROTO      (cp * D + dp) * P + pp of C*D*P     tp 0
    MEGATRON_PP_ONLY                  all get the same                    tp 0, cp 0, dp 0: one per pp
    3D_PROTO                          another name of MEGATRON_COMPUTE_PROTO

`..._PROTO` modes split carriers and join results; the others take lists with one item a part, and return lists.

Invariants
    - What is collected is in the order of the parts, whatever order the ranks have.
    - A grid in which a place is missing or taken twice is an error, not a wrong order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rlflow.single_controller.base.dispatch import (
    PerRank,
    Plan,
    Same,
    join_parts,
    register_dispatch_mode,
    split_by_parts,
)
from rlflow.utils.errors import ContractError

if TYPE_CHECKING:
    from rlflow.single_controller.base.worker_group import WorkerGroup

AXES = ("tp", "cp", "dp", "pp")
Place = Mapping[str, int]


@dataclass(frozen=True)
class Parts:
    """How one mode divides a group.

    Attributes:
        of_rank: number of the part that each rank gets.
        collect_order: the rank whose result is taken for each part, in the order of the parts.
    """

    of_rank: tuple[int, ...]
    collect_order: tuple[int, ...]


@dataclass(frozen=True)
class ParallelLayout:
    """The grid of a group.

    Attributes:
        places: for each rank, its place on each axis.
        sizes: length of each axis.
    """

    places: tuple[Place, ...]
    sizes: Place

    @classmethod
    def build(cls, infos: Sequence[Mapping[str, int]]) -> ParallelLayout:
        """Of what the workers answered, in rank order; axes that are left out have length 1.

        Raises:
            ContractError: the workers disagree about the sizes, or do not fill the grid, each place once.
        """
        shapes = [tuple(int(info.get(f"{axis}_size", 1)) for axis in AXES) for info in infos]
        taken = [tuple(int(info.get(f"{axis}_rank", 0)) for axis in AXES) for info in infos]
        if len(set(shapes)) != 1:
            raise ContractError(f"the workers disagree about their parallel sizes {AXES}: {sorted(set(shapes))}")
        if sorted(taken) != sorted(itertools.product(*map(range, shapes[0]))):
            sizes = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, shapes[0], strict=True))
            raise ContractError(
                f"the places {AXES} of ranks 0..{len(infos) - 1} are {taken}; they must fill a grid of {sizes}, each "
                "place once. Check what get_parallel_info of the workers returns."
            )
        places = tuple(dict(zip(AXES, place, strict=True)) for place in taken)
        return cls(places, dict(zip(AXES, shapes[0], strict=True)))

    def by_dp(self) -> Parts:
        """One part per data-parallel rank."""
        last = self.sizes["pp"] - 1
        return self._parts(lambda p: p["dp"], lambda p: p["tp"] == 0 and p["cp"] == 0 and p["pp"] == last)

    def by_row(self) -> Parts:
        """One part for all tensor-parallel peers: pp runs fastest, then dp, then cp."""
        sizes = self.sizes
        return self._parts(lambda p: (p["cp"] * sizes["dp"] + p["dp"]) * sizes["pp"] + p["pp"], lambda p: p["tp"] == 0)

    def by_stage(self) -> Parts:
        """One part per pipeline stage."""
        return self._parts(lambda p: p["pp"], lambda p: p["tp"] == p["cp"] == p["dp"] == 0)

    def _parts(self, part: Callable[[Place], int], collects: Callable[[Place], bool]) -> Parts:
        collecting = {part(place): rank for rank, place in enumerate(self.places) if collects(place)}
        return Parts(tuple(map(part, self.places)), tuple(collecting[i] for i in range(len(collecting))))


def _split_rows(view: str, group: WorkerGroup, *args: Any, **kwargs: Any) -> Plan:
    return split_by_parts(group, _parts_of(group, view).of_rank, args, kwargs)


def _spread_items(view: str, group: WorkerGroup, *args: Any, **kwargs: Any) -> Plan:
    parts = _parts_of(group, view)
    wanted = len(parts.collect_order)

    def spread(value: Any) -> list[Any]:
        if not isinstance(value, (list, tuple)) or len(value) != wanted:
            size = f" of {len(value)}" if hasattr(value, "__len__") else ""
            raise ContractError(f"each argument must be a list of {wanted} items, got a {type(value).__name__}{size}")
        return [value[part] for part in parts.of_rank]

    return PerRank(tuple(map(spread, args)), {key: spread(value) for key, value in kwargs.items()})


def _send_same(group: WorkerGroup, *args: Any, **kwargs: Any) -> Plan:
    return Same(args, kwargs)


def _join_rows(view: str, group: WorkerGroup, output: list[Any]) -> Any:
    return group._gather(output, partial(_join_picked, order=_parts_of(group, view).collect_order))


def _join_picked(values: list[Any], order: Sequence[int]) -> Any:
    return join_parts([values[rank] for rank in order])


def _pick_items(view: str, group: WorkerGroup, output: list[Any]) -> list[Any]:
    return group._pick(output, _parts_of(group, view).collect_order)


def _parts_of(group: WorkerGroup, view: str) -> Parts:
    parts: Parts = getattr(group.parallel_layout(), view)()
    return parts


for _prefix, _view in (("MEGATRON_COMPUTE", "by_dp"), ("MEGATRON_PP_AS_DP", "by_row")):
    register_dispatch_mode(_prefix, partial(_spread_items, _view), partial(_pick_items, _view))
    register_dispatch_mode(f"{_prefix}_PROTO", partial(_split_rows, _view), partial(_join_rows, _view))
register_dispatch_mode("MEGATRON_PP_ONLY", _send_same, partial(_pick_items, "by_stage"))
register_dispatch_mode("3D_PROTO", partial(_split_rows, "by_dp"), partial(_join_rows, "by_dp"))
