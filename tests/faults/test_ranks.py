"""A rank that is stopped in the middle of a call is named, within the limit of the collective or of the call."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from rlflow.single_controller.base import Dispatch, Worker, register
from rlflow.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, WorkerError
from rlflow.utils.device import COLLECTIVE_TIMEOUT_ENV
from rlflow.utils.errors import DeadlineError

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Summing(Worker):
    """Ranks that meet in an all-reduce, as those of an engine do."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def prepare(self):
        from rlflow.workers.engine.process import prepare_process

        prepare_process(self.context)
        return self.add_up(None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add_up(self, stopped_rank):
        import torch

        if self.rank == stopped_rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        return int(total)


@pytest.fixture
def make(ray_cluster: None) -> Iterator[Any]:
    groups = []

    def start(collective_s: float, call_s: float) -> RayWorkerGroup:
        pool = RayResourcePool([2], device_name="cpu")
        group = RayWorkerGroup(
            pool,
            RayClassWithInitArgs(Summing),
            worker_env={COLLECTIVE_TIMEOUT_ENV: str(collective_s)},
            call_timeout_s=call_s,
        )
        groups.append((group, pool))
        return group

    yield start
    for group, pool in groups:
        group.shutdown(grace_s=0.1)
        pool.release()


def test_a_collective_that_waits_for_a_stopped_rank_ends_by_nccl_timeout_and_names_it(make: Any) -> None:
    group = make(collective_s=4.0, call_s=120.0)
    assert group.prepare() == [2, 2]
    started = time.monotonic()
    with pytest.raises(WorkerError) as error:
        group.add_up(1)
    assert 3.0 < time.monotonic() - started < 20
    text = str(error.value)
    assert f"rank 0 (pid {group.pids[0]}" in text and "method 'add_up'" in text
    assert f"no answer yet from rank 1 (pid {group.pids[1]}" in text


def test_a_call_whose_rank_is_stopped_ends_at_its_deadline_and_names_it(make: Any) -> None:
    group = make(collective_s=600.0, call_s=60.0)
    group.prepare()
    object.__setattr__(group._settings, "call_timeout_s", 3.0)
    started = time.monotonic()
    with pytest.raises(DeadlineError) as error:
        group.add_up(1)
    assert 2.5 < time.monotonic() - started < 15
    places = f"rank 0 (pid {group.pids[0]} on {ray.util.get_node_ip_address()}), rank 1 (pid {group.pids[1]}"
    assert f"Waited 3 s for Summing.add_up and got no answer from {places}" in str(error.value)
    assert "trainer.call_timeout_s" in str(error.value)
