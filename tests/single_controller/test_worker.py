"""A worker on its own: context, meshes, declarations. No Ray."""

from __future__ import annotations

import copy
import pickle

import pytest

from rlflow.single_controller.base import (
    MAGIC_ATTR,
    Dispatch,
    Execute,
    MeshTopology,
    Worker,
    WorkerContext,
    mesh,
    register,
    register_dispatch_mode,
    registered_methods,
    update_dispatch_mode,
)
from rlflow.single_controller.base.context import free_port, normalise_visible_devices
from rlflow.single_controller.base.dispatch import as_plan, get_predefined_dispatch_fn
from rlflow.utils.errors import ConfigError, ContractError


class Inner(Worker):
    @register(dispatch_mode=mesh("train"), reads=("input_ids",), writes=("values",), optional_reads=("position_ids",))
    def infer(self, batch):
        return batch


class Outer(Inner):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update(self):
        return self.rank


@pytest.fixture
def worker():
    return Outer(context=WorkerContext(rank=1, world_size=2, master_port=1234))


def test_a_worker_needs_no_environment_when_it_gets_a_context(worker, monkeypatch):
    assert (worker.rank, worker.world_size, worker.get_master_addr_port()) == (1, 2, ("127.0.0.1", "1234"))
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="RANK"):
        Outer()


def test_a_context_survives_the_environment(monkeypatch):
    context = WorkerContext(3, 4, 1, 2, "10.0.0.1", 99, 0, "wg_")
    assert WorkerContext.from_env(context.to_env()) == context
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert WorkerContext.from_env(torchrun).local_rank == 1
    with pytest.raises(ConfigError, match="outside a world"):
        WorkerContext(rank=2, world_size=2)


def test_an_outer_worker_takes_over_the_place_of_an_inner_one(worker):
    inner = Inner(context=WorkerContext())
    with pytest.raises(ContractError, match="name the mesh"):
        inner.get_dispatch_collect()
    inner._register_dispatch_collect_info("train", dp_rank=1, is_collect=False)
    worker.set_dispatch_collect("actor", **inner.get_dispatch_collect())
    assert worker._query_dispatch_info("actor") == 1
    assert worker.query_collect_info("actor") is False
    with pytest.raises(ValueError, match="registered already"):
        worker.set_dispatch_collect("actor", 0, True)
    with pytest.raises(ContractError, match="no mesh 'ref'"):
        worker.query_collect_info("ref")


def test_registered_methods_carry_their_declaration_inherited_ones_too():
    found = dict(registered_methods(Outer))
    assert found["infer"]["mesh"] == "train"
    assert (found["infer"]["reads"], found["infer"]["writes"]) == (("input_ids",), ("values",))
    assert found["infer"]["optional_reads"] == ("position_ids",)
    assert found["update"]["blocking"] is False
    assert getattr(Outer.infer, MAGIC_ATTR)["execute_mode"] is Execute.ALL
    assert "_query_topology" in found


@pytest.mark.parametrize(
    "bad",
    [
        {"dispatch_mode": "ONE_TO_ALL"},
        {"dispatch_mode": {"dispatch_fn": len}},
        {"execute_mode": "ALL"},
        {"reads": "input_ids"},
        {"writes": ("a", "a")},
    ],
)
def test_a_wrong_declaration_fails_at_decoration(bad):
    with pytest.raises(ContractError):
        register(**bad)


def test_a_topology_collects_each_part_once_in_order_of_the_parts():
    topology = MeshTopology.build("m", [(1, True, 1), (1, False, 1), (0, True, 1), (0, False, 1)])
    assert (topology.dp_size, topology.collect_order) == (2, (2, 0))
    with pytest.raises(ContractError, match="one rank of each"):
        MeshTopology.build("m", [(0, True, 1), (0, True, 1)])
    with pytest.raises(ContractError, match="one rank of each"):
        MeshTopology.build("m", [(0, True, 1), (1, False, 1)])
    with pytest.raises(ContractError, match="versions"):
        MeshTopology.build("m", [(0, True, 1), (1, True, 2)])


def test_dispatch_members_are_themselves_after_pickle_and_copy():
    for member in [*Dispatch, *Execute]:
        assert pickle.loads(pickle.dumps(member)) is member
        assert copy.deepcopy(member) is member


def test_a_dispatch_mode_can_be_added_and_changed():
    try:
        mode = register_dispatch_mode("mine", lambda group, *a, **k: (a, k), lambda group, out: out)
        assert mode is Dispatch.MINE
        with pytest.raises(ValueError, match="exists"):
            register_dispatch_mode("MINE", len, len)
        update_dispatch_mode(mode, len, max)
        assert get_predefined_dispatch_fn(mode) == {"dispatch_fn": len, "collect_fn": max}
    finally:
        Dispatch.remove("MINE")


def test_a_dispatch_function_must_give_one_item_per_worker():
    assert as_plan((([1, 2],), {"k": (3, 4)}), 2).of(1) == ((2,), {"k": 4})
    with pytest.raises(ContractError, match=r"argument 0 .* \(3\)"):
        as_plan((([1, 2],), {}), 3)
    with pytest.raises(ContractError, match="argument 'k'"):
        as_plan(((), {"k": "ab"}), 2)
    with pytest.raises(ContractError, match="returned NoneType"):
        as_plan(None, 2)


@pytest.mark.parametrize(
    ("env", "want"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ({"ROCR_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "2"}),
        ({}, {}),
    ],
)
def test_visible_devices_end_in_one_variable(env, want):
    normalise_visible_devices(env)
    assert env == want


@pytest.mark.parametrize("other", ["HIP", "ROCR"])
def test_visible_devices_that_contradict_are_refused(other):
    with pytest.raises(ValueError, match=other):
        normalise_visible_devices({"CUDA_VISIBLE_DEVICES": "0", f"{other}_VISIBLE_DEVICES": "1"})


def test_the_first_free_port_of_a_range_is_taken():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert free_port(ports=range(port, port + 20)) != port
        with pytest.raises(ConfigError, match="no free port"):
            free_port(ports=range(port, port + 1))
