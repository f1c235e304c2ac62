"""Worker groups that start in a second or two: their workers import neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def make_group(ray_cluster: None) -> Iterator[Callable[..., Any]]:
    """`make_group(cls_or_roles, [2])` -> group on CPU; groups and pools end with the module."""
    from rlflow.single_controller.ray import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        create_colocated_worker_cls,
    )

    made: list[tuple[Any, Any]] = []

    def make(cls: Any, process_on_nodes: list[int], *args: Any, pool: Any = None, **kwargs: Any) -> Any:
        if isinstance(cls, dict):
            spec = create_colocated_worker_cls({role: RayClassWithInitArgs(role_cls) for role, role_cls in cls.items()})
        else:
            spec = RayClassWithInitArgs(cls, *args)
        pool = pool or RayResourcePool(process_on_nodes, device_name="cpu")
        group = RayWorkerGroup(pool, spec, **kwargs)
        made.append((group, pool))
        return group

    yield make
    for group, pool in made:
        group.shutdown()
        pool.release()
