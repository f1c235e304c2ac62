"""Worker, WorkerGroup and the rules of a call; nothing here knows Ray or torch."""

from rlflow.single_controller.base.context import WorkerContext
from rlflow.single_controller.base.decorator import (
    MAGIC_ATTR,
    Dispatch,
    Execute,
    PerRank,
    Same,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    make_nd_compute_dataproto_dispatch_fn,
    mesh,
    register,
    register_dispatch_mode,
    registered_methods,
    update_dispatch_mode,
)
from rlflow.single_controller.base.worker import Worker
from rlflow.single_controller.base.worker_group import ClassWithInitArgs, MeshTopology, ResourcePool, WorkerGroup

__all__ = [
    "MAGIC_ATTR",
    "ClassWithInitArgs",
    "Dispatch",
    "Execute",
    "MeshTopology",
    "PerRank",
    "ResourcePool",
    "Same",
    "Worker",
    "WorkerContext",
    "WorkerGroup",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "mesh",
    "register",
    "register_dispatch_mode",
    "registered_methods",
    "update_dispatch_mode",
]
