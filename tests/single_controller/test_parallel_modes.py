"""Whatever the layout of a group, rows go out once per part and come back in the order in which they were sent."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.data_proto import DataProto, DataProtoFuture
from rlflow.protocol import Future
from rlflow.single_controller.base import Dispatch, Execute, Worker, WorkerContext, mesh, register
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError

AXES = ("pp", "dp", "cp", "tp")  # the slowest first: Megatron's own order of ranks
CARRIERS = ["DP_COMPUTE_PROTO", "MEGATRON_COMPUTE_PROTO", "MEGATRON_PP_AS_DP_PROTO", "3D_PROTO", "mesh"]


def mode(name):
    return Dispatch[name]


class Echo(Worker):
    """Returns what it gets; its place on the grid is given."""

    def __init__(self, rank, world_size, place, sizes):
        super().__init__(context=WorkerContext(rank=rank, world_size=world_size))
        self.place, self.sizes, self.seen = place, sizes, None
        outputs = place["tp"] == place["cp"] == 0 and place["pp"] == sizes["pp"] - 1
        self._register_dispatch_collect_info("grid", place["dp"], outputs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_parallel_info(self):
        info = {f"{axis}_rank": self.place[axis] for axis in AXES}
        return info | {f"{axis}_size": self.sizes[axis] for axis in AXES}

    def _echo(self, data):
        self.seen = data
        return data

    @register(dispatch_mode=mode("DP_COMPUTE_PROTO"))
    def DP_COMPUTE_PROTO(self, data):
        return self._echo(data)

    @register(dispatch_mode=mode("MEGATRON_COMPUTE_PROTO"))
    def MEGATRON_COMPUTE_PROTO(self, data):
        return self._echo(data)

    @register(dispatch_mode=mode("MEGATRON_PP_AS_DP_PROTO"))
    def MEGATRON_PP_AS_DP_PROTO(self, data):
        return self._echo(data)

    @register(transfer_mode="3D_PROTO", blocking=False)
    def transfer(self, data):
        return self._echo(data)

    @register(dispatch_mode=mesh("grid"))
    def mesh(self, data):
        return self._echo(data)

    @register(dispatch_mode=mode("MEGATRON_COMPUTE"))
    def MEGATRON_COMPUTE(self, item):
        return self._echo(item)

    @register(dispatch_mode=mode("MEGATRON_PP_AS_DP"), blocking=False)
    def MEGATRON_PP_AS_DP(self, item):
        return self._echo(item)

    @register(dispatch_mode=mode("MEGATRON_PP_ONLY"))
    def stage_names(self, prefix):
        return f"{prefix}{self.place['pp']}"

    @register(dispatch_mode=mode("DP_COMPUTE_METRIC"))
    def count(self, data):
        return len(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def first(self, data):
        return self.rank, len(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, materialize_futures=False)
    def kind(self, data):
        return type(data).__name__


setattr(Echo, "3D_PROTO", Echo.transfer)


def build(local_group, pp, dp, cp, tp, shuffle=None):
    """A group in Megatron's rank order, or in any other."""
    sizes = dict(zip(AXES, (pp, dp, cp, tp), strict=True))
    places = [dict(zip(AXES, place, strict=True)) for place in itertools.product(*map(range, sizes.values()))]
    if shuffle is not None:
        random.Random(shuffle).shuffle(places)
    return local_group([Echo(rank, len(places), place, sizes) for rank, place in enumerate(places)])


def rows(n, **options):
    """Dense, jagged and object columns; value i says that it is of row i."""
    jagged = tu.nested_from_list([torch.full((i % 3 + 1,), i) for i in range(n)]) if n else None
    tensors = {"x": torch.arange(n)} | ({"j": jagged} if n else {})
    return DataProto.from_dict(tensors, {"uid": [[f"row{i}"] for i in range(n)]}, {"temperature": 1.0}, **options)


def assert_same(first, second):
    tu.assert_tensordict_eq(first.to_tensordict(), second.to_tensordict())


def parts_of(name, pp, dp, cp, tp):
    if name == "DP_COMPUTE_PROTO":
        return pp * dp * cp * tp
    return pp * dp * cp if name == "MEGATRON_PP_AS_DP_PROTO" else dp


def result(group, name, data):
    output = getattr(group, name)(data)
    return output.get() if isinstance(output, Future) else output


sizes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.integers(1, 3))


@settings(max_examples=25, deadline=None)
@given(shape=sizes, name=st.sampled_from(CARRIERS), each=st.integers(1, 3), shuffle=st.none() | st.integers(0, 9))
def test_rows_that_divide_come_back_in_order(local_group, shape, name, each, shuffle):
    group = build(local_group, *shape, shuffle)
    data = rows(each * parts_of(name, *shape))
    assert_same(result(group, name, data), data)
    assert all(len(worker.seen) == each for worker in group.workers)
    batch = data.to_tensordict()
    tu.assert_tensordict_eq(result(group, name, batch), batch)


@settings(max_examples=25, deadline=None)
@given(shape=sizes, name=st.sampled_from(CARRIERS), n=st.integers(1, 13), shuffle=st.none() | st.integers(0, 9))
def test_rows_that_do_not_divide_are_padded_where_they_may_be(local_group, shape, name, n, shuffle):
    group = build(local_group, *shape, shuffle)
    data, parts = rows(n, auto_padding=True), parts_of(name, *shape)
    assert_same(result(group, name, data), data)
    assert len(data) == n
    assert {len(worker.seen) for worker in group.workers} == {-(-n // parts)}
    if n % parts:
        with pytest.raises(ContractError, match=f"{n} rows"):
            result(group, name, rows(n))


@settings(max_examples=15, deadline=None)
@given(shape=sizes, shuffle=st.none() | st.integers(0, 9))
def test_lists_with_an_item_a_part_come_back_in_order(local_group, shape, shuffle):
    group = build(local_group, *shape, shuffle)
    pp, dp, cp, tp = shape
    assert group.MEGATRON_COMPUTE(list(range(dp))) == list(range(dp))
    assert [worker.seen for worker in group.workers] == [worker.place["dp"] for worker in group.workers]
    calls = group.MEGATRON_PP_AS_DP(tuple(range(pp * dp * cp)))
    assert [call() for call in calls] == list(range(pp * dp * cp))
    assert group.stage_names("layer") == [f"layer{stage}" for stage in range(pp)]
    with pytest.raises(ContractError, match=f"a list of {dp} items, got a list of {dp + 1}"):
        group.MEGATRON_COMPUTE(list(range(dp + 1)))


def test_pipeline_stages_that_sample_give_rows_in_order_of_parts_not_of_ranks(local_group):
    """T = P = D = 2: parts 0..3 go to the ranks (0, 1), (4, 5), (2, 3), (6, 7)."""
    group = build(local_group, pp=2, dp=2, cp=1, tp=2)
    out = group.MEGATRON_PP_AS_DP_PROTO(rows(4))
    assert out.batch["x"].tolist() == [0, 1, 2, 3]
    assert [worker.seen.batch["x"].item() for worker in group.workers] == [0, 0, 2, 2, 1, 1, 3, 3]
    group.MEGATRON_COMPUTE_PROTO(rows(2))
    assert [worker.seen.batch["x"].item() for worker in group.workers] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_worker_without_a_layout_is_a_data_parallel_rank(local_group):
    class Plain(Worker):
        @register(dispatch_mode=Dispatch["MEGATRON_COMPUTE_PROTO"])
        def echo(self, data):
            return data

    group = local_group([Plain(context=WorkerContext(rank=rank, world_size=3)) for rank in range(3)])
    assert_same(group.echo(rows(6)), rows(6))
    assert group.parallel_layout().sizes == {"tp": 1, "cp": 1, "dp": 3, "pp": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [({"dp": 0}, "must fill a grid of tp=1, cp=1, dp=2, pp=1"), ({"dp": 2}, "each place once")],
)
def test_a_grid_with_a_place_taken_twice_or_missing_is_refused(local_group, change, message):
    group = build(local_group, pp=1, dp=2, cp=1, tp=1)
    before = group.workers[1].place
    group.workers[1].place = before | change
    with pytest.raises(ContractError, match=message):
        group.MEGATRON_COMPUTE_PROTO(rows(2))
    group.workers[1].place = before
    group.workers[1].sizes = group.workers[1].sizes | {"tp": 2}
    with pytest.raises(ContractError, match="disagree"):
        group.MEGATRON_COMPUTE_PROTO(rows(2))


def test_a_layout_is_asked_once_until_it_is_refreshed(local_group):
    group = build(local_group, pp=1, dp=2, cp=1, tp=1)
    assert group.parallel_layout() is group.parallel_layout()
    before = group.parallel_layout()
    group.refresh_topology()
    assert group.parallel_layout() is not before


def test_a_result_that_is_awaited_later_loses_its_padding_and_feeds_another_call(local_group):
    group = build(local_group, pp=1, dp=2, cp=1, tp=1)
    data = rows(3, auto_padding=True)
    future = getattr(group, "3D_PROTO")(data)
    assert isinstance(future, DataProtoFuture)
    assert_same(future.get(), data)
    even = getattr(group, "3D_PROTO")(rows(4))
    assert_same(group.MEGATRON_COMPUTE_PROTO(even), rows(4))
    assert group.kind(even) == ["Future", "Future"]
    assert [len(part.get()) for part in even.chunk(2)] == [2, 2]


def test_metrics_are_a_list_and_rank_zero_gives_one_value(local_group):
    group = build(local_group, pp=1, dp=4, cp=1, tp=1)
    assert group.count(rows(5, auto_padding=True)) == [2, 2, 2, 2]
    assert group.first(rows(5)) == (0, 5)


@pytest.mark.parametrize("name", ["DP_COMPUTE_PROTO", "DP_COMPUTE_METRIC", "MEGATRON_COMPUTE", "3D_PROTO"])
def test_rank_zero_alone_would_drop_rows_of_modes_that_split(name):
    with pytest.raises(ContractError, match="drop the others"):
        register(dispatch_mode=Dispatch[name], execute_mode=Execute.RANK_ZERO)
    with pytest.raises(ContractError, match="drop the others"):
        register(dispatch_mode=mesh("grid"), execute_mode=Execute.RANK_ZERO)


def test_transfer_mode_is_another_name_of_dispatch_mode():
    with pytest.raises(ContractError, match="mean the same"):
        register(dispatch_mode=Dispatch.ONE_TO_ALL, transfer_mode="3D_PROTO")
    with pytest.raises(ContractError, match="4D_PROTO.*3D_PROTO"):
        register(transfer_mode="4D_PROTO")
    with pytest.raises(ContractError, match="got a int"):
        register(transfer_mode=3)
