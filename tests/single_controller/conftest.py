"""Worker groups that start in a second or two: their workers import neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


@pytest.fixture(scope="session")
def local_group() -> Callable[[Sequence[Any]], Any]:
    """`local_group(workers)` -> a worker group whose workers are objects of this process; calls run when awaited."""
    from functools import partial

    from rlflow import protocol
    from rlflow.single_controller.base import WorkerGroup
    from rlflow.single_controller.base.dispatch import PerRank

    class LocalGroup(WorkerGroup):
        def __init__(self, workers: Sequence[Any]) -> None:
            super().__init__()
            self.workers = list(workers)
            self._world_size = len(self.workers)
            self._bind_worker_method(type(self.workers[0]))

        def _start(self, method: str, plan: Any, ranks: Sequence[int]) -> list[Any]:
            calls = []
            for rank in ranks:
                args, kwargs = plan.of(rank) if isinstance(plan, PerRank) else (plan.args, plan.kwargs)
                calls.append(partial(getattr(self.workers[rank], method), *args, **kwargs))
            return calls

        def _wait(self, refs: list[Any], *_: Any) -> list[Any]:
            return [call() for call in refs]

        def _gather(self, output: list[Any], function: Callable[[list[Any]], Any]) -> Any:
            if all(isinstance(item, partial) for item in output):
                return protocol.Future(output, function, fetch=lambda refs, timeout_s: self._wait(refs))
            return function(output)

    return LocalGroup
