"""Rows stay in the queue: workers fetch what they read and write what they return, the controller sees keys."""

from __future__ import annotations

import sys

import pytest
import ray
import torch

import rlflow.transfer_queue as tq
from rlflow.data_proto import DataProto
from rlflow.single_controller.base import Dispatch, Worker, WorkerContext, mesh, register
from rlflow.single_controller.ray import WorkerError
from rlflow.transfer_queue import KVBatchMeta
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

KEYS = [f"e0r{i}a0_0_0" for i in range(4)]


class Model(Worker):
    """Two data-parallel ranks of two peers each."""

    def __init__(self, context=None):
        super().__init__(context=context)
        self._register_dispatch_collect_info("actor", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)
        self.seen = []

    @register(dispatch_mode=mesh("actor"), reads=("responses",), optional_reads=("bonus",), writes=("old_log_probs",))
    def compute_log_prob(self, batch):
        self.seen = sorted(batch.keys())
        scale = tu.get(batch, "temperature")
        values = tu.nested_values(batch["responses"]).float() * scale
        out = {"old_log_probs": tu.nested_like(values, batch["responses"])}
        return tu.get_tensordict(out, {"rows": batch.batch_size[0], "rank": self.rank})

    @register(dispatch_mode=mesh("actor"))
    async def everything(self, batch):
        self.seen = sorted(batch.keys())
        return tu.get_tensordict({"title": [f"{uid}!" for uid in tu.get(batch, "uid")]})

    @register(dispatch_mode=mesh("actor"), reads=("responses",))
    def metrics(self, batch):
        return tu.get_tensordict({}, {"metrics": {"rank": self.rank, "rows": batch.batch_size[0]}})

    @register(dispatch_mode=mesh("actor"), reads=("absent",))
    def read_absent(self, batch):
        return None

    @register(dispatch_mode=mesh("actor"), reads=("responses",), writes=("values",), optional_writes=("entropy",))
    def write_others(self, batch):
        names = tu.get(batch, "names")
        return tu.get_tensordict({name: torch.zeros(batch.batch_size[0]) for name in names})

    @register(dispatch_mode=mesh("actor"), reads=("responses",))
    def drop_a_row(self, batch):
        return tu.get_tensordict({"x": torch.zeros(batch.batch_size[0] - 1)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_parallel_info(self):
        return {"tp_rank": self.rank % 2, "tp_size": 2, "dp_rank": self.rank // 2, "dp_size": 2}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def negate(self, data):
        data.batch["x"].neg_()
        data.meta_info = {"metrics": {"rank": self.rank, "rows": len(data)}}
        return data

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO, blocking=False)
    def negate_by_peers(self, data):
        return self.negate(data)

    @register(dispatch_mode=Dispatch.MEGATRON_PP_AS_DP, blocking=False)
    def which(self, item):
        return self.rank, item

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def last_seen(self):
        return self.seen


@pytest.fixture(scope="module")
def queue(ray_cluster):
    tq.init()
    yield
    tq.close()


@pytest.fixture
def meta(queue):
    rows = tu.get_tensordict(
        {
            "responses": tu.nested_from_list([torch.arange(1, i + 2) for i in range(4)]),
            "uid": [key.split("_")[0] for key in KEYS],
            "other": torch.ones(4),
        }
    )
    tags = [{"status": "success", "seq_len": i} for i in range(4)]
    tq.kv_batch_put(KEYS, "train", fields=rows, tags=tags)
    yield KVBatchMeta(keys=list(KEYS), tags=tags, partition_id="train")
    tq.kv_clear(KEYS, "train")


@pytest.fixture(scope="module")
def model(make_group, queue):
    return make_group(Model, [4])


def with_info(meta, **info):
    return KVBatchMeta(meta.keys, meta.tags, meta.partition_id, meta.fields, info)


def test_fields_go_through_the_queue_and_come_back_under_the_same_keys(model, meta):
    meta.reorder([2, 0, 3, 1])
    out = model.compute_log_prob(with_info(meta, temperature=0.5))
    assert (out.keys, out.tags, out.partition_id) == (meta.keys, meta.tags, "train")
    assert out.extra_info == {"rows": [2, 2], "rank": [0, 2]}
    data = tq.kv_batch_get(meta.keys, "train", ["responses", "old_log_probs"])
    assert torch.equal(tu.nested_values(data["old_log_probs"]), tu.nested_values(data["responses"]).float() * 0.5)
    assert tu.nested_lengths(data["old_log_probs"]).tolist() == [3, 1, 4, 2]


def test_only_declared_fields_are_fetched_and_optional_ones_where_they_are(model, meta):
    model.compute_log_prob(with_info(meta, temperature=1.0))
    assert model.last_seen()[0] == ["responses", "temperature"]
    tq.kv_batch_put(KEYS, "train", fields=tu.get_tensordict({"bonus": torch.ones(4)}))
    model.compute_log_prob(with_info(meta, temperature=1.0))
    assert model.last_seen()[0] == ["bonus", "responses", "temperature"]


def test_without_a_declaration_all_common_fields_are_fetched_also_by_async_methods(model, meta):
    out = model.everything(meta)
    assert model.last_seen() == [["other", "responses", "uid"]] * 4
    data = tq.kv_batch_get(out.keys, "train", ["title"])
    assert tu.get(data, "title") == [f"e0r{i}a0!" for i in range(4)]
    model.everything(KVBatchMeta(meta.keys, meta.tags, "train", ["uid"]))
    assert model.last_seen() == [["uid"]] * 4


def test_a_batch_without_rows_is_returned_as_it_is(model, meta):
    assert tu.get(model.metrics(meta), "metrics") == {"rank": 0, "rows": 2}


def test_a_tensordict_argument_passes_unchanged(model, queue):
    batch = tu.get_tensordict({"responses": tu.nested_from_list([torch.ones(2), torch.ones(1)])}, {"temperature": 2.0})
    out = model.compute_log_prob(batch)
    assert tu.nested_values(out["old_log_probs"]).tolist() == [2.0, 2.0, 2.0]


def test_a_method_called_in_its_own_process_touches_no_queue():
    worker = Model(WorkerContext.single())
    batch = tu.get_tensordict({"responses": tu.nested_from_list([torch.ones(2)])}, {"temperature": 3.0})
    assert tu.nested_values(worker.compute_log_prob(batch)["old_log_probs"]).tolist() == [3.0, 3.0]


def test_an_absent_field_is_named(model, meta):
    with pytest.raises(WorkerError, match="absent") as error:
        model.read_absent(meta)
    assert isinstance(error.value.__cause__, tq.MissingFieldError)


@pytest.mark.parametrize(
    ("names", "message"),
    [(["values", "advantages"], r"not declared: \['advantages'\]"), (["entropy"], r"missing: \['values'\]")],
)
def test_fields_that_were_not_promised_are_refused(model, meta, names, message):
    with pytest.raises(WorkerError, match=message) as error:
        model.write_others(with_info(meta, names=names))
    assert isinstance(error.value.__cause__, ContractError)
    assert "advantages" not in tq.kv_batch_get(KEYS, "train").keys()


def test_optional_writes_may_be_there_or_not(model, meta):
    model.write_others(with_info(meta, names=["values"]))
    assert "entropy" not in tq.kv_batch_get(KEYS, "train").keys()
    model.write_others(with_info(meta, names=["values", "entropy"]))
    assert "entropy" in tq.kv_batch_get(KEYS, "train").keys()


def test_a_result_of_another_length_is_refused(model, meta):
    with pytest.raises(WorkerError, match="got 2 rows and returned 1"):
        model.drop_a_row(meta)


def test_rows_that_do_not_divide_are_refused_before_anything_is_sent(model, meta):
    with pytest.raises(ContractError, match="3 rows"):
        model.metrics(meta.select_keys(KEYS[:3]))


def test_a_data_proto_of_any_size_goes_to_the_workers_and_comes_back(model):
    data = DataProto.from_dict({"x": torch.arange(5)}, {"image": [{i} for i in range(5)]}, auto_padding=True)
    out = model.negate(data)
    assert out.batch["x"].tolist() == [0, -1, -2, -3, -4] and out.non_tensor_batch["image"][4] == {4}
    assert out.meta_info == {"metrics": {"rank": [0, 1, 2, 3], "rows": [2, 2, 2, 2]}}
    assert data.batch["x"].tolist() == [0, 1, 2, 3, 4]


def test_a_future_of_a_data_proto_goes_on_to_other_workers(model):
    future = model.negate_by_peers(DataProto.from_dict({"x": torch.arange(4)}))
    assert model.negate(future).batch["x"].tolist() == [0, 1, 2, 3]
    assert future.get().meta_info == {"metrics": {"rank": [0, 2], "rows": [2, 2]}}
    assert model.which(["a", "b"]).get() == [(0, "a"), (2, "b")]
