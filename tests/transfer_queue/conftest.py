"""One table for a test module, once in Ray actors (three units, so that batches spread) and once in this process."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rlflow.transfer_queue as tq

_numbers = itertools.count()

RAY_CONF = {"backend": {"SimpleStorage": {"num_data_storage_units": 3, "exact_unit_count": True}}}
LOCAL_CONF = {"backend": {"storage_backend": "Local"}}


@pytest.fixture(scope="module", params=["ray", "local"])
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    """A running table owned by this process."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    tq.close()
    tq.init(RAY_CONF if request.param == "ray" else LOCAL_CONF)
    yield
    tq.close()


@pytest.fixture
def ray_table(ray_cluster: None) -> Iterator[None]:
    """A fresh table in Ray actors."""
    tq.close()
    tq.init(RAY_CONF)
    yield
    tq.close()


@pytest.fixture(scope="module")
def shared_ray_table(ray_cluster: None) -> Iterator[None]:
    """One table in Ray actors for the tests of a module that leave it whole."""
    tq.close()
    tq.init(RAY_CONF)
    yield
    tq.close()


@pytest.fixture
def partition() -> str:
    """A partition name of its own for each test."""
    return f"p{next(_numbers)}"


@pytest.fixture
def compat(table: None) -> Iterator[None]:
    """The reading rules of `init(strict=False)` for one test."""
    tq.init(strict=False)
    yield
    tq.init()


class Process:
    """A process that does what it is told."""

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def processes(ray_cluster: None) -> Iterator[list[Any]]:
    """Two processes (Ray actors) for a module, which attach by themselves: `process.run.remote(function, *args)`."""
    import ray

    started = [ray.remote(num_cpus=0)(Process).remote() for _ in range(2)]
    yield started
    for process in started:
        ray.kill(process)
