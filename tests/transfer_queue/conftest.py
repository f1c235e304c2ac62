"""One table for a test module, once in Ray actors (three units, so that batches spread) and once in this process."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rlflow.transfer_queue as tq
from rlflow.transfer_queue.lane import Lane
from rlflow.transfer_queue.ports import RayPort
from rlflow.utils.ray_utils import ray_get

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


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages sent by this process, through Ray or over the controller's socket."""
    sent: list[str] = []
    start, begin = RayPort.start, Lane.begin

    def recording(self: RayPort, method: str, *args: Any) -> Any:
        sent.append(method)
        return start(self, method, *args)

    def recording_lane(self: Lane, method: str, *args: Any) -> Any:
        connection = begin(self, method, *args)
        if connection is not None:
            sent.append(method)
        return connection

    monkeypatch.setattr(RayPort, "start", recording)
    monkeypatch.setattr(Lane, "begin", recording_lane)
    return sent


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


class TableProcesses:
    """The processes of the tables that run in this cluster, and the memory they hold."""

    def actors(self, prefix: str) -> list[Any]:
        """Handles of the named actors of this kind, by number."""
        import ray

        found = [each for each in ray.util.list_named_actors(all_namespaces=True) if each["name"].startswith(prefix)]
        return [ray.get_actor(**each) for each in sorted(found, key=lambda each: each["name"])]

    def pid_of(self, actor: Any) -> int:
        return ray_get(actor.__ray_call__.remote(lambda _: os.getpid()), what="a pid", timeout_s=30)

    def units(self) -> list[int]:
        """Process ids of the storage units."""
        return [self.pid_of(unit) for unit in self.actors("TransferQueueStorageUnit#")]

    def memory_files(self, pids: list[int]) -> dict[int, int]:
        """{inode: bytes} of the files in memory that these processes hold open, Ray's object store aside."""
        found = {}
        for pid in pids:
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    target, status = os.readlink(path), path.stat()
                    if target.startswith(("/memfd:", "/dev/shm")) and "plasma" not in target:
                        found[status.st_ino] = status.st_blocks * 512
        return found


@pytest.fixture
def table_processes(ray_cluster: None) -> TableProcesses:
    """Looks at the processes of the running tables."""
    return TableProcesses()
