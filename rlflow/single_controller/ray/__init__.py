"""Worker groups on Ray actors. Imports Ray, not torch."""

from rlflow.single_controller.errors import WorkerError
from rlflow.single_controller.ray.colocate import RayClassWithInitArgs, create_colocated_worker_cls
from rlflow.single_controller.ray.pool import (
    RayResourcePool,
    ResourcePoolManager,
    SubRayResourcePool,
    merge_resource_pool,
    split_resource_pool,
)
from rlflow.single_controller.ray.worker_group import RayWorkerGroup

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "SubRayResourcePool",
    "WorkerError",
    "create_colocated_worker_cls",
    "merge_resource_pool",
    "split_resource_pool",
]
