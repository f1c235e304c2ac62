"""`Worker`: base of the classes whose methods run in the processes of a worker group.

Invariants
    - A worker knows its place from one `WorkerContext`; nothing else reads RANK and the like.
    - A mesh is registered once a worker, before it is used; what is registered does not change under a running call
      (the group sends the version it knows, and a worker refuses an outdated one).

Functions that the controller sends for execution travel by pickle and run with the worker's rights: the controller is
trusted, and its cluster must not be open to others.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlflow.single_controller.base.context import WorkerContext, free_port, normalise_visible_devices
from rlflow.single_controller.base.decorator import Dispatch, Execute, register
from rlflow.utils.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class MeshPlace:
    """A worker's place in one mesh: its data-parallel rank, and whether its results are collected."""

    dp_rank: int
    is_collect: bool


class Worker:
    """One process's part of a worker group.

    Args:
        cuda_visible_devices: written to CUDA_VISIBLE_DEVICES when given.
        context: place in the group; None: read from the environment (`ConfigError` when it is not there).
    """

    def __init__(self, cuda_visible_devices: str | None = None, *, context: WorkerContext | None = None) -> None:
        self.context = WorkerContext.from_env() if context is None else context
        if cuda_visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices
        normalise_visible_devices(os.environ)
        self._meshes: dict[str, MeshPlace] = {}
        self._mesh_versions: dict[str, int] = {}
        # Roles of the same process by name; the process fills it in.
        self.fused_worker_dict: Mapping[str, Any] = {}

    # ---- place in the group ------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank in the group, 0 .. world_size - 1."""
        return self.context.rank

    @property
    def world_size(self) -> int:
        """Processes in the group."""
        return self.context.world_size

    def get_master_addr_port(self) -> tuple[str, str]:
        """(address, port) of rank 0's rendezvous."""
        return self.context.master_addr, str(self.context.master_port)

    def get_cuda_visible_devices(self) -> str:
        """CUDA_VISIBLE_DEVICES of this process, `"not set"` without."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    def get_available_master_addr_port(self) -> tuple[str, str]:
        """(address, port) at which this process could open a rendezvous; loopback in a group on one node."""
        if self.context.local_world_size == self.context.world_size:
            address = "127.0.0.1"
        else:
            address = socket.gethostbyname(socket.gethostname())
        return address, str(free_port(address))

    def get_fused_worker_by_name(self, name: str) -> Any:
        """Another role of this process; None when it has no role of that name."""
        return self.fused_worker_dict.get(name)

    @classmethod
    def env_keys(cls) -> list[str]:
        """Environment variables that a group sets for its workers."""
        return [*WorkerContext().to_env(), "CUDA_VISIBLE_DEVICES"]

    # ---- meshes ------------------------------------------------------------------------------------------------

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Say where this worker stands in a mesh; `ValueError` when it has said so already."""
        if mesh_name in self._meshes:
            raise ValueError(f"mesh {mesh_name!r} is registered already, as {self._meshes[mesh_name]}")
        self._meshes[mesh_name] = MeshPlace(int(dp_rank), bool(is_collect))
        self._mesh_versions[mesh_name] = self._mesh_versions.get(mesh_name, 0) + 1

    def _forget_dispatch_collect_info(self, mesh_name: str) -> None:
        """Withdraw a mesh so that it can be registered anew (elastic resizing); its version counts on."""
        self._meshes.pop(mesh_name, None)

    def get_dispatch_collect(self, mesh_name: str | None = None) -> dict[str, Any]:
        """`{"dp_rank", "is_collect"}` of one mesh, for `set_dispatch_collect` of an outer worker.

        Raises:
            ContractError: no name given and not exactly one mesh registered, or no mesh of that name.
        """
        if mesh_name is None:
            if len(self._meshes) != 1:
                raise ContractError(f"name the mesh: this worker has {sorted(self._meshes) or 'none'}")
            mesh_name = next(iter(self._meshes))
        place = self._place(mesh_name)
        return {"dp_rank": place.dp_rank, "is_collect": place.is_collect}

    def set_dispatch_collect(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Take over an inner worker's place: `set_dispatch_collect("actor", **inner.get_dispatch_collect())`."""
        self._register_dispatch_collect_info(mesh_name, dp_rank, is_collect)

    def query_collect_info(self, mesh_name: str) -> bool:
        """Whether this worker's results of a mesh are collected."""
        return self._place(mesh_name).is_collect

    def _place(self, mesh_name: str) -> MeshPlace:
        try:
            return self._meshes[mesh_name]
        except KeyError:
            raise ContractError(
                f"{type(self).__name__} (rank {self.rank}) has no mesh {mesh_name!r}, only {sorted(self._meshes)}. "
                "Register it (_register_dispatch_collect_info) before the first call, usually in init_model."
            ) from None

    def check_mesh_version(self, mesh_name: str, version: int) -> None:
        """`ContractError` when the group split a batch by a topology that is not this worker's."""
        mine = self._mesh_versions.get(mesh_name, 0)
        if mine != version:
            raise ContractError(
                f"mesh {mesh_name!r} changed (version {mine}, the group knows {version}); call group.refresh_topology()"
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_topology(self) -> dict[str, tuple[int, bool, int]]:
        """(dp_rank, is_collect, version) in every mesh of this worker."""
        return {
            name: (place.dp_rank, place.is_collect, self._mesh_versions[name]) for name, place in self._meshes.items()
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        """This worker's data-parallel rank in a mesh."""
        return self._place(mesh_name).dp_rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        """Whether this worker's results of a mesh are collected."""
        return self.query_collect_info(mesh_name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_parallel_info(self) -> dict[str, int]:
        """This worker's place by tensor, context, data and pipeline parallelism: `{"dp_rank", "dp_size", ...}`.

        What is left out of `tp`, `cp` and `pp` has rank 0 and size 1. Workers whose model is split override it.
        """
        return {"dp_rank": self.rank, "dp_size": self.world_size}

    # ---- functions sent by the controller ----------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`func(self, ...)` on every worker, its batches split over them."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`func(...)`, without the worker, in the process of rank 0."""
        return func(*args, **kwargs)

    def close(self) -> None:
        """Release what the process holds (process groups, files); called once before the group ends the process."""
