"""Failures are bounded and name the rank, the role, the method and what happened there."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time

import psutil
import pytest
import ray

from rlflow.single_controller.base import Dispatch, Worker, mesh, register
from rlflow.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, WorkerError
from rlflow.utils.errors import ConfigError, ContractError, DeadlineError

pytestmark = pytest.mark.alone

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Fragile(Worker):
    def __init__(self, fail_at=None, log=None):
        super().__init__()
        if fail_at == self.rank:
            raise RuntimeError("no such model")
        self.log = log

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ping(self):
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def raise_on(self, rank):
        if self.rank == rank:
            raise ContractError("responses are longer than input_ids")
        time.sleep(8)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def raise_later(self):
        raise KeyError("weights")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_on(self, rank):
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, timeout_s=0.5)
    def sleep_on(self, rank, seconds):
        if self.rank == rank:
            time.sleep(seconds)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def fail_later(self):
        raise ValueError("late")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_child(self):
        return subprocess.Popen(["sleep", "600"]).pid

    def close(self):
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"closed {self.rank}\n")


class Gloo(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add_up(self):
        import torch

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        total = torch.tensor([self.rank + 1])
        torch.distributed.all_reduce(total)
        return int(total), torch.get_num_threads()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_in_a_collective(self):
        import torch

        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.all_reduce(torch.zeros(1))


@pytest.fixture(scope="module")
def fragile(make_group):
    return make_group(Fragile, [2])


def test_an_exception_names_rank_role_and_method_and_carries_the_remote_traceback(fragile):
    start = time.monotonic()
    with pytest.raises(WorkerError) as error:
        fragile.raise_on(1)
    # Rank 0 sleeps on, as a peer would in a collective: the failure must not wait for it.
    assert time.monotonic() - start < 4
    found = error.value
    assert (found.rank, found.role, found.method, found.died) == (1, "Fragile", "raise_on", False)
    assert f"rank 1 (pid {fragile.pids[1]}" in str(found)
    assert "ContractError: responses are longer than input_ids" in str(found)
    assert "in raise_on" in found.remote_traceback
    assert isinstance(found.__cause__, ContractError)
    again = pickle.loads(pickle.dumps(found))
    assert (str(again), again.rank, again.method) == (str(found), 1, "raise_on")


def test_exceptions_of_coroutines_and_of_non_blocking_calls_are_named_too(make_group):
    group = make_group(Fragile, [1])
    with pytest.raises(WorkerError, match="method 'raise_later': KeyError"):
        group.raise_later()
    with pytest.raises(WorkerError, match="ValueError: late"):
        group.fail_later().get()
    assert group.ping() == [0]


def test_a_call_that_is_not_answered_ends_at_its_deadline(make_group):
    group = make_group(Fragile, [2])
    with pytest.raises(DeadlineError, match=r"Waited 0.5 s for Fragile.sleep_on .* from rank 1 \(pid"):
        group.sleep_on(1, 3.0)


def test_a_killed_worker_is_named_at_the_call_and_nothing_is_left_behind(make_group):
    group = make_group(Fragile, [2])
    pids = group.pids
    start = time.monotonic()
    with pytest.raises(WorkerError) as error:
        group.die_on(1)
    assert time.monotonic() - start < 10
    assert (error.value.rank, error.value.died) == (1, True)
    assert "its process died" in str(error.value)
    with pytest.raises(WorkerError, match="rank 1"):
        group.ping()
    group.shutdown(grace_s=0.2)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_shutdown_closes_roles_and_ends_processes_and_their_children(make_group, tmp_path):
    group = make_group(Fragile, [2], None, str(tmp_path / "log"))
    pids = [*group.pids, *group.start_child()]
    assert all(psutil.pid_exists(pid) for pid in pids)
    group.shutdown()
    assert sorted((tmp_path / "log").read_text().split("\n")) == ["", "closed 0", "closed 1"]
    _, left = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=5)
    assert not left
    group.shutdown()
    with pytest.raises(WorkerError, match="was shut down"):
        group.ping()


def test_a_constructor_that_raises_is_named_and_leaves_no_process(ray_cluster):
    pool = RayResourcePool([2], device_name="cpu")
    before = {p.pid for p in psutil.process_iter()}
    with pytest.raises(WorkerError) as error:
        RayWorkerGroup(pool, RayClassWithInitArgs(Fragile, 1))
    assert (error.value.rank, error.value.role, error.value.method) == (1, "Fragile", "build")
    assert "RuntimeError: no such model" in str(error.value)
    hosts = [
        p for p in psutil.process_iter(["cmdline"]) if p.pid not in before and "RoleHost" in str(p.info["cmdline"])
    ]
    assert not hosts
    pool.release()


def test_ranks_meet_over_loopback_and_a_death_in_a_collective_names_the_dead_rank(make_group):
    group = make_group(Gloo, [2])
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert group.add_up() == [(3, threads)] * 2
    assert group.master_address == "127.0.0.1"
    with pytest.raises(WorkerError) as error:
        group.die_in_a_collective()
    assert (error.value.rank, error.value.died) == (1, True)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"master_addr": "127.0.0.1"}, "both or none"),
        ({"worker_env": {"RANK": "3"}}, r"worker_env sets \['RANK'\]"),
        ({"device_name": "cuda"}, "is for 'cpu'"),
        ({"colour": 1}, r"does not know \['colour'\]"),
    ],
)
def test_arguments_that_contradict_one_another_are_refused(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        RayWorkerGroup(RayResourcePool([1], device_name="cpu"), RayClassWithInitArgs(Fragile), **kwargs)


def test_worker_env_and_a_given_rendezvous_reach_the_workers(make_group):
    group = make_group(
        Reader, [1], worker_env={"MY_FLAG": "7"}, master_addr="127.0.0.1", master_port=12345, name_prefix="mine_"
    )
    assert group.read() == [("7", "127.0.0.1", "12345", "mine_")]


class Reader(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read(self):
        return os.environ["MY_FLAG"], *self.get_master_addr_port(), self.context.group

    @register(dispatch_mode=mesh("x"))
    def unused(self, rows):
        return rows
