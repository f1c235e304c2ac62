"""`DataProto` keeps rows together, leaves the caller's objects alone, and says by name what does not fit."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch

from rlflow.data_proto import (
    BatchData,
    DataProto,
    DataProtoConfig,
    DataProtoError,
    DataProtoFuture,
    DataProtoItem,
    all_gather_data_proto,
    collate_fn,
    fold_batch_dim,
    list_of_dict_to_dict_of_list,
    object_array,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)
from rlflow.protocol import Future
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError


def make(n=4, **options):
    tensors = {"x": torch.arange(n), "j": tu.nested_from_list([torch.full((i % 3 + 1,), i) for i in range(n)])}
    return DataProto.from_dict(tensors, {"uid": [[i, i] for i in range(n)]}, {"temperature": 0.7}, **options)


def ids(data):
    """Row numbers, which all columns must agree about."""
    order = data.batch["x"].tolist()
    assert [row[0].item() for row in data.batch["j"].unbind()] == order
    assert [uid[0] for uid in data.non_tensor_batch["uid"]] == order
    return order


# ---- building --------------------------------------------------------------------------------------------------------


def test_the_arguments_of_from_dict_are_left_alone():
    uids, info = {"uid": [[1, 2], [3, 4]]}, {"a": 1}
    data = DataProto.from_dict({"x": torch.zeros(2)}, uids, info, auto_padding=True)
    assert (uids, info) == ({"uid": [[1, 2], [3, 4]]}, {"a": 1})
    assert data.non_tensor_batch["uid"].shape == (2,) and data.is_padding_enabled()


def test_a_batch_may_lack_any_part():
    assert (len(DataProto()), len(DataProto()[:-2]), DataProto().chunk(2)[1].batch) == (0, 0, None)
    assert len(DataProto.from_dict(non_tensors={"a": ["x", "y"]})[1:]) == 1
    assert DataProto(meta_info={"metrics": {"a": 1}}).to_tensordict().batch_size == torch.Size([])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)}), "a: 2, b: 3"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2)}, {"u": [1]}), r"batch \(with a\): 2, .*'u'.*: 1"),
        (lambda: DataProto.from_dict({"a": torch.tensor(1.0)}), "a is a scalar tensor"),
        (lambda: DataProto.from_dict(non_tensors={"u": "text"}), "'u'.* is a str"),
        (lambda: DataProto(non_tensor_batch={"u": [1, 2]}), "'u'.* is a list"),
        (lambda: DataProto(batch={"a": torch.zeros(2)}), "must be a TensorDict"),
        (lambda: DataProto(tu.get_tensordict({}, {"metrics": 1})), "one row dimension"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2, 2)}, num_batch_dims=2), "fold_batch_dim"),
    ],
)
def test_parts_that_do_not_fit_are_named(build, message):
    with pytest.raises(DataProtoError, match=message) as error:
        build()
    assert isinstance(error.value, AssertionError) and isinstance(error.value, ContractError)


def test_one_dict_of_tensors_and_arrays():
    data = DataProto.from_single_dict({"x": torch.zeros(2), "n": np.arange(2)}, {"a": 1})
    assert list(data.batch.keys()) == ["x"] and data.non_tensor_batch["n"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="u is a list"):
        DataProto.from_single_dict({"u": [1, 2]})


def test_to_a_tensordict_and_back():
    data = make()
    batch = data.to_tensordict()
    assert tu.get(batch, "uid") == [[0, 0], [1, 1], [2, 2], [3, 3]] and tu.get(batch, "temperature") == 0.7
    again = DataProto.from_tensordict(batch, {"more": 1})
    assert ids(again) == [0, 1, 2, 3] and again.meta_info == {"temperature": 0.7, "more": 1}
    metrics = tu.get_tensordict({}, {"metrics": {"loss": 1.0}})
    assert DataProto.from_tensordict(metrics).meta_info == {"metrics": {"loss": 1.0}}
    with pytest.raises(DataProtoError, match="temperature"):
        DataProto.from_tensordict(batch, {"temperature": 1})
    data.meta_info["x"] = 1
    with pytest.raises(DataProtoError, match="x is in batch and meta_info"):
        data.to_tensordict()


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, -2), [3, 1]),
        (slice(-1, None), [3]),
        ([2, 0, 2, -1], [2, 0, 2, 3]),
        (np.array([True, False, False, True]), [0, 3]),
        ([False, True, True, False], [1, 2]),
        (torch.tensor([3, 1]), [3, 1]),
    ],
)
def test_rows_are_chosen_as_a_whole(index, rows):
    data = make()
    assert ids(data[index]) == rows
    assert data[index].meta_info is data.meta_info


def test_one_row_is_an_item():
    data = make()
    item = data[-1]
    assert isinstance(item, DataProtoItem) and item.meta_info is data.meta_info
    assert (item.batch["x"].item(), item.batch["j"].tolist(), item.non_tensor_batch["uid"]) == (3, [3], [3, 3])
    assert [item.batch["x"].item() for item in data] == [0, 1, 2, 3]
    assert ids(collate_fn(list(data))) == [0, 1, 2, 3]
    with pytest.raises(DataProtoError, match="item 1 lacks uid"):
        collate_fn([data[0], DataProtoItem(data[1].batch)])
    with pytest.raises(IndexError, match="row 4"):
        data[4]
    with pytest.raises(TypeError, match="str"):
        data["x"]
    with pytest.raises(ContractError, match="outside a batch of 4"):
        data[[4]]


def test_parts():
    data = make(6)
    assert [ids(part) for part in data.chunk(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [ids(part) for part in data.split(4)] == [[0, 1, 2, 3], [4, 5]]
    assert data.chunk(2)[0].batch["x"].data_ptr() == data.batch["x"].data_ptr()
    with pytest.raises(DataProtoError, match="6 rows cannot be split into 4"):
        data.chunk(4)
    data.meta_info[DataProtoConfig.auto_padding_key] = True
    assert [len(part) for part in data.chunk(4)] == [2, 2, 2]


def test_repeats():
    data = make(3)
    assert ids(data.repeat(2)) == [0, 0, 1, 1, 2, 2]
    assert ids(data.repeat(2, interleave=False)) == [0, 1, 2, 0, 1, 2]
    for counts in ([2, 0, 1], torch.tensor([2, 0, 1]), np.array([2, 0, 1])):
        assert ids(data.sample_level_repeat(counts)) == [0, 0, 2]
    with pytest.raises(DataProtoError, match="each of 3 rows"):
        data.sample_level_repeat([1, 1])


def test_reorder_is_in_place_and_takes_every_row_once():
    data = make(3)
    data.reorder(torch.tensor([2, 0, 1]))
    assert ids(data) == [2, 0, 1]
    with pytest.raises(DataProtoError, match="no order of 3 rows"):
        data.reorder([0, 0, 1])


def test_padding():
    data = make(3)
    padded, pad = pad_dataproto_to_divisor(data, 7)
    assert (ids(padded), pad, len(data)) == ([0, 1, 2, 0, 1, 2, 0], 4, 3)
    assert ids(unpad_dataproto(padded, pad)) == [0, 1, 2]
    assert pad_dataproto_to_divisor(data, 3) == (data, 0)
    with pytest.raises(DataProtoError, match="8 rows of padding off a batch of 7"):
        unpad_dataproto(padded, 8)
    data.padding(1)
    data.padding(2, "first")
    assert ids(data) == [0, 1, 2, 2, 0, 0]
    with pytest.raises(DataProtoError, match="without rows"):
        DataProto().padding(1)


def test_padding_is_enabled_for_a_batch_a_process_or_by_the_environment(monkeypatch):
    assert not make().is_padding_enabled() and make(auto_padding=True).is_padding_enabled()
    monkeypatch.setenv("VERL_AUTO_PADDING", "TRUE")
    assert make().is_padding_enabled()
    monkeypatch.delenv("VERL_AUTO_PADDING")
    DataProtoConfig.auto_padding = True
    assert make().is_padding_enabled()
    DataProtoConfig.auto_padding = False
    assert not make().is_padding_enabled()


def test_columns_become_rows():
    data = DataProto.from_dict({"x": torch.arange(8).reshape(2, 4), "y": torch.arange(2)}, {"u": ["a", "b"]})
    out = data.unfold_column_chunks(2, ["x"])
    assert out.batch["x"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert out.batch["y"].tolist() == [0, 0, 1, 1] and out.non_tensor_batch["u"].tolist() == list("aabb")
    assert data.unfold_column_chunks(2).batch["x"].shape == (4, 4)
    with pytest.raises(DataProtoError, match=r"x is of \(2, 4\)"):
        data.unfold_column_chunks(3, ["x"])


def test_rows_in_groups():
    data = DataProto.from_dict({"x": torch.arange(6)}, {"u": list("abcdef")})
    folded = fold_batch_dim(data, 2)
    assert folded.batch["x"].tolist() == [[0, 1, 2], [3, 4, 5]] and folded.non_tensor_batch["u"].shape == (2, 3)
    assert unfold_batch_dim(folded).batch["x"].tolist() == list(range(6))
    with pytest.raises(DataProtoError, match="6 rows cannot be folded into 4"):
        fold_batch_dim(data, 4)
    with pytest.raises(DataProtoError, match="jagged.*: j"):
        fold_batch_dim(make(4), 2)


def test_an_iterator_gives_each_row_once_an_epoch_in_an_order_of_its_seed():
    def order(seed):
        return [ids(mini) for mini in make(6).make_iterator(2, 2, seed, {"shuffle": True})]

    assert order(1) == order(1) != order(2)
    assert sorted(sum(order(1)[:3], [])) == sorted(sum(order(1)[3:], [])) == list(range(6))
    with pytest.raises(ContractError, match="mini_batch_size=4 does not divide a batch of 6"):
        make(6).make_iterator(4, 1)


# ---- names -----------------------------------------------------------------------------------------------------------


def test_select_shares_values_and_nothing_else():
    data = make()
    chosen = data.select(["x"], ["absent"], [])
    assert (list(chosen.batch.keys()), chosen.non_tensor_batch, chosen.meta_info) == (["x"], {}, {})
    assert chosen.batch["x"] is data.batch["x"]
    everything = data.select()
    everything.meta_info["new"] = everything.batch["new"] = torch.zeros(4)
    assert "new" not in data.meta_info and "new" not in data.batch.keys()
    assert data.select(deepcopy=True).non_tensor_batch["uid"][0] is not data.non_tensor_batch["uid"][0]
    with pytest.raises(KeyError, match="absent not in the batch; it has x, j"):
        data.select(["absent"])


def test_pop_takes_all_or_nothing():
    data = make()
    with pytest.raises(DataProtoError, match="cannot pop absent: meta_info has temperature"):
        data.pop(["x"], ["uid"], ["absent"])
    taken = data.pop(["x"], ["uid"], ["temperature"])
    assert list(taken.batch.keys()) == ["x"] and taken.meta_info == {"temperature": 0.7}
    assert list(data.batch.keys()) == ["j"] and not data.non_tensor_batch and not data.meta_info


def test_rename():
    data = make()
    assert data.rename("x", "y").rename(["y", "j"], ["j", "y"]) is data
    assert data.batch["j"].tolist() == [0, 1, 2, 3]
    with pytest.raises(TypeError, match="int"):
        data.rename(1, "z")
    with pytest.raises(ValueError, match="as many"):
        data.rename(["j", "y"], ["z"])
    with pytest.raises(DataProtoError, match="absent not there"):
        data.rename("absent", "z")
    with pytest.raises(DataProtoError, match="y there already"):
        data.rename("j", "y")


def test_union_adds_what_agrees_or_nothing():
    data = make()
    more = DataProto.from_dict({"x": torch.arange(4), "y": torch.ones(4)}, {"n": [float("nan")] * 4}, {"k": 1})
    assert data.union(more) is data and {"y", "x", "j"} == set(data.batch.keys())
    data.union(more)
    for other, message in [
        (DataProto.from_dict({"x": torch.zeros(4, dtype=torch.int64), "z": torch.ones(4)}), "batch: x in both"),
        (DataProto.from_dict({"z": torch.ones(4)}, {"uid": list("abcd")}), "non_tensor_batch: uid"),
        (DataProto.from_dict({"z": torch.ones(4)}, meta_info={"k": 2}), "meta_info: k"),
        (DataProto.from_dict({"z": torch.ones(3)}), r"4 rows \(.*\) and 3 rows \(z\)"),
    ]:
        with pytest.raises(DataProtoError, match=message):
            data.union(other)
        assert "z" not in data.batch.keys()
    assert list(DataProto(meta_info={"a": 1}).union(make()).batch.keys()) == ["x", "j"]


def test_union_helpers_work_in_place():
    first = {"a": np.array([1.0, float("nan")])}
    assert union_numpy_dict(first, {"a": np.array([1.0, float("nan")]), "b": np.ones(2)}) is first and "b" in first
    batch = tu.get_tensordict({"x": torch.ones(2)})
    assert union_tensor_dict(batch, tu.get_tensordict({"y": torch.ones(2)})) is batch and "y" in batch.keys()
    with pytest.raises(DataProtoError, match=r"\[2\] rows.*\[3\]"):
        union_tensor_dict(batch, tu.get_tensordict({"y": torch.ones(3)}))


def test_concat_joins_rows_and_gathers_metrics():
    parts = make(6).chunk(2)
    for i, part in enumerate(parts):
        part.meta_info = {"temperature": 1 if i else 1.0, "metrics": {"loss": i}, f"own{i}": i}
    joined = DataProto.concat(parts)
    assert ids(joined) == list(range(6))
    assert joined.meta_info == {"temperature": 1, "own0": 0, "own1": 1, "metrics": {"loss": [0, 1]}}
    parts[1].meta_info["temperature"] = 2
    with pytest.raises(DataProtoError, match="'temperature'.* differs"):
        DataProto.concat(parts)
    with pytest.raises(DataProtoError, match=r"batch 1 \(3 rows\) and batch 0 \(3 rows\) differ in \['uid'\]"):
        DataProto.concat([parts[0], parts[1].select(non_tensor_batch_keys=[], meta_info_keys=[])])
    with pytest.raises(DataProtoError, match="no batches"):
        DataProto.concat([])
    assert list_of_dict_to_dict_of_list([{"a": 1}, {"a": 2, "b": 3}]) == {"a": [1, 2], "b": [3]}


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_what_is_in_a_batch_is_told(caplog):
    text = make().to("cpu").get_data_info()
    assert "  x: (4) (torch.int64) cpu" in text and "  j: (4, *) jagged" in text
    assert "  uid: ndarray(4,) (object)" in text and "  temperature: float" in text
    with caplog.at_level(logging.INFO):
        make().print_size("step 1")
    assert caplog.messages == ["step 1, size of tensors: 0.000 GiB, of arrays: 0.000 GiB"]


def test_copies():
    data = make()
    shallow, deep = copy.copy(data), copy.deepcopy(data)
    assert shallow.batch is data.batch and shallow.meta_info is data.meta_info
    deep.batch["x"].add_(1)
    deep.non_tensor_batch["uid"][0].append(1)
    assert ids(data) == [0, 1, 2, 3] and data.non_tensor_batch["uid"][0] == [0, 0]


def test_the_rows_of_all_ranks(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        data = make()
        all_gather_data_proto(data, dist.group.WORLD)
        assert ids(data) == [0, 1, 2, 3] and data.meta_info == {"temperature": 0.7}
    finally:
        dist.destroy_process_group()


def test_a_future_collects_then_dispatches(ray_cluster):
    import ray

    refs = [ray.put(part) for part in make(6).chunk(3)]
    assert ids(DataProtoFuture.concat(refs).get()) == list(range(6))
    assert ids(DataProtoFuture(DataProto.concat, refs, lambda data: data[::2]).get()) == [0, 2, 4]
    assert ids(DataProtoFuture(lambda parts: parts[1], refs).get()) == [2, 3]
    assert [ids(part.get()) for part in DataProtoFuture(None, refs).chunk(2)] == [[0, 1, 2], [3, 4, 5]]
    assert isinstance(Future(refs), DataProtoFuture)


def test_batch_data_asks_the_carriers():
    data = BatchData(make())
    assert data.is_chunkable() and not data.is_concatable()
    parts = BatchData(data.chunk(2))
    assert parts.is_concatable() and not parts.is_chunkable()
    assert ids(parts.concat()) == [0, 1, 2, 3]
    assert not BatchData(5).is_chunkable() and not BatchData([make(), 5]).is_concatable()


def test_an_array_of_objects_has_one_dimension():
    assert object_array([[1, 2], [3, 4]]).shape == (2,) and object_array([]).shape == (0,)
