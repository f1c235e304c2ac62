"""Carriers are split into equal parts and joined in order, whatever they are."""

from __future__ import annotations

import subprocess
import sys

import pytest
import ray
import torch

from rlflow import protocol
from rlflow.transfer_queue import KVBatchMeta
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError, DeadlineError


def _batch(n=4):
    return tu.get_tensordict({"x": torch.arange(n), "j": tu.nested_from_values(torch.arange(2 * n), [2] * n)}, {"o": 1})


def _meta(n=4):
    return KVBatchMeta([f"k{i}" for i in range(n)], [{"i": i} for i in range(n)], "train", None, {"option": [1]})


@pytest.mark.parametrize("make", [_batch, _meta])
def test_parts_joined_again_are_the_carrier(make):
    carrier = make()
    parts = protocol.chunk(carrier, 2)
    assert [len(part) for part in parts] == [2, 2]
    joined = protocol.concat(parts)
    if protocol.is_tensordict(carrier):
        tu.assert_tensordict_eq(joined, carrier)
    else:
        assert joined == carrier


@pytest.mark.parametrize("make", [_batch, _meta])
def test_rows_that_do_not_divide_are_refused(make):
    with pytest.raises(ContractError, match="4 rows"):
        protocol.chunk(make(), 3)


def test_what_is_no_carrier_is_refused():
    for value in (5, "text", [1, 2], {"a": 1}, tu.get_tensordict({}, {"metrics": 1})):
        with pytest.raises(ContractError, match="cannot be split"):
            protocol.chunk(value, 1)
    with pytest.raises(ContractError, match="cannot join"):
        protocol.concat([_batch(), _meta()])
    with pytest.raises(ContractError, match="nothing"):
        protocol.concat([])


def test_metrics_of_several_workers_are_those_of_the_first():
    parts = [tu.get_tensordict({}, {"metrics": i}) for i in range(2)]
    assert tu.get(protocol.concat(parts), "metrics") == 0


def test_futures_are_split_and_joined_before_they_are_done(ray_cluster):
    refs = [ray.put(part) for part in protocol.chunk(_batch(), 2)]
    future = protocol.concat(refs)
    tu.assert_tensordict_eq(future.get(), _batch())
    parts = protocol.chunk(refs, 4)
    assert [part.get()["x"].tolist() for part in parts] == [[0], [1], [2], [3]]
    tu.assert_tensordict_eq(protocol.concat(parts).get(), _batch())
    assert protocol.drop_rows(future, 1).get()["x"].tolist() == [0, 1, 2]
    with pytest.raises(ContractError, match="4 rows"):
        future.chunk(3)[0].get()


def test_a_future_crosses_processes_with_its_collect_function(ray_cluster):
    future = protocol.Future([ray.put(1), ray.put(2)], sum)

    @ray.remote(num_cpus=0)
    def resolve(value):
        return value.get()

    assert ray.get(resolve.remote(future), timeout=60) == 3


def test_a_future_that_is_never_done_ends_at_its_deadline(ray_cluster):
    @ray.remote(num_cpus=0)
    def hang():
        import time

        time.sleep(30)

    ref = hang.remote()
    with pytest.raises(DeadlineError, match="the weights"):
        protocol.Future([ref], what="the weights", timeout_s=0.2).get()
    ray.cancel(ref, force=True)


def test_importing_the_layer_loads_neither_torch_nor_ray():
    code = (
        "import sys, rlflow.protocol, rlflow.single_controller.base; "
        "assert not {'torch', 'ray', 'tensordict'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
