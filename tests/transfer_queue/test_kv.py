"""Putting and getting through the public functions, over Ray actors and in one process."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import rlflow.transfer_queue as tq

pytestmark = pytest.mark.usefixtures("table")


def jagged(*rows: list[float]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def batch(**fields: object) -> TensorDict:
    size = next(iter(fields.values())).shape[0]  # type: ignore[attr-defined]
    return TensorDict(fields, batch_size=[size])


def test_tags_of_two_puts_are_merged(partition):
    tq.kv_put("a", partition, tag={"is_prompt": True, "status": "pending"})
    meta = tq.kv_put("a", partition, tag={"status": "running"})
    assert meta.tags == [{"is_prompt": True, "status": "running"}]
    assert tq.kv_list(partition) == {partition: {"a": {"is_prompt": True, "status": "running"}}}


def test_a_data_put_leaves_tags_alone(partition):
    stale = tq.kv_batch_put(["a"], partition, tags=[{"status": "running"}])
    tq.kv_put("a", partition, tag={"status": "finished"})
    tq.kv_batch_put(stale.keys, partition, fields=batch(x=torch.ones(1)))
    assert tq.kv_list(partition)[partition]["a"] == {"status": "finished"}


def test_a_row_with_only_a_tag_is_listed_and_cannot_be_read(partition):
    tq.kv_put("marker", partition, tag={"status": "pending"})
    assert "marker" in tq.kv_list(partition)[partition]
    with pytest.raises(ValueError, match="only a tag"):
        tq.kv_batch_get("marker", partition)
    with pytest.raises(tq.MissingFieldError, match="'x'"):
        tq.kv_batch_get("marker", partition, "x")


def test_rows_come_in_the_order_of_the_keys(partition):
    keys = [f"k{i}" for i in range(9)]
    for start in range(0, 9, 3):  # three blocks, in three units where there are three
        rows = jagged(*[[float(i)] * (i + 1) for i in range(start, start + 3)])
        tq.kv_batch_put(keys[start : start + 3], partition, batch(x=rows, n=torch.arange(start, start + 3)))
    order = [8, 0, 4, 7, 1, 2, 6, 5, 3]
    got = tq.kv_batch_get([keys[i] for i in order], partition)
    assert got["n"].tolist() == order
    assert got["x"].offsets().diff().tolist() == [i + 1 for i in order]
    assert [row[0].item() for row in got["x"].unbind()] == order


def test_layouts_of_scalars_equal_rows_and_strings(partition):
    tq.kv_batch_put(
        ["a", "b"],
        partition,
        batch(
            score=torch.tensor([0.5, 1.5]),
            equal=torch.ones(2, 3),
            text=NonTensorStack("x", "y"),
            position_ids=torch.arange(16).reshape(2, 4, 2),
        ),
    )
    got = tq.kv_batch_get(["a", "b"], partition)
    assert got.batch_size == torch.Size([2])
    assert not got["score"].is_nested
    assert got["score"].tolist() == [0.5, 1.5]
    assert got["equal"].offsets().tolist() == [0, 3, 6]
    assert got.get("text").tolist() == ["x", "y"]
    assert [tuple(row.shape) for row in got["position_ids"].unbind()] == [(4, 2), (4, 2)]


def test_rows_ragged_in_the_last_dimension_round_trip(partition):
    rows = [torch.arange(4 * n).reshape(4, n) for n in (3, 5)]
    tq.kv_put("a", partition, {"position_ids": rows[0]})
    tq.kv_put("b", partition, {"position_ids": rows[1]})
    got = tq.kv_batch_get(["b", "a"], partition)["position_ids"]
    assert got._ragged_idx == 2
    assert got.offsets().diff().tolist() == [5, 3]
    assert all(torch.equal(x, y) for x, y in zip(got.unbind(), reversed(rows), strict=True))
    # The table has seen which dimension is ragged, so one row alone comes in the same layout.
    assert tq.kv_batch_get("a", partition)["position_ids"]._ragged_idx == 2


def test_overwriting_one_field_keeps_the_others(partition):
    tq.kv_batch_put(["a", "b"], partition, batch(x=torch.zeros(2), y=jagged([1.0], [2.0, 3.0])))
    tq.kv_batch_put(["b"], partition, batch(x=torch.ones(1)))
    got = tq.kv_batch_get(["a", "b"], partition)
    assert got["x"].tolist() == [0, 1]
    assert got["y"].values().tolist() == [1, 2, 3]


def test_a_put_reports_the_fields_all_its_rows_have(partition):
    tq.kv_batch_put(["a", "b"], partition, batch(x=torch.zeros(2)))
    tq.kv_batch_put(["a"], partition, batch(y=torch.zeros(1)))
    meta = tq.kv_batch_put(["a", "b"], partition, batch(z=torch.zeros(2)), tags=[{"n": 1}, {}])
    assert meta == tq.KVBatchMeta(["a", "b"], [{"n": 1}, {}], partition, ["x", "z"], {})


def test_kv_put_takes_a_dict_of_one_row(partition):
    tq.kv_put(
        "a",
        partition,
        {"ids": torch.tensor([1, 2]), "n": torch.tensor(7), "extra": {"k": [1]}, "array": np.arange(3)},
        {"status": "success"},
    )
    tq.kv_put("b", partition, TensorDict({"ids": torch.tensor([[5]])}, batch_size=[1]))
    got = tq.kv_batch_get("a", partition)
    assert got["ids"].unbind()[0].tolist() == [1, 2]
    assert got["n"].tolist() == [7]
    assert got.get("extra").tolist() == [{"k": [1]}]
    assert got.get("array").tolist()[0].tolist() == [0, 1, 2]
    assert tq.kv_batch_get("b", partition)["ids"].values().tolist() == [5]


def test_strict_reads_name_what_is_missing(partition):
    tq.kv_batch_put(["a", "b"], partition, batch(x=torch.zeros(2)))
    tq.kv_batch_put(["a"], partition, batch(opt=torch.ones(1)))
    with pytest.raises(tq.StorageKeyNotFoundError, match="'gone'"):
        tq.kv_batch_get(["a", "gone"], partition)
    with pytest.raises(tq.MissingFieldError, match="'opt' is absent from 1 of 2 requested rows.*'b'"):
        tq.kv_batch_get(["a", "b"], partition, ["x", "opt"])
    assert tq.kv_batch_get(["a", "b"], partition, ["x", "opt"], missing_ok=["opt"]).keys() == {"x"}
    assert tq.kv_batch_get(["a"], partition, ["x", "opt"], missing_ok=["opt"]).keys() == {"x", "opt"}
    only_optional = tq.kv_batch_get(["b"], partition, ["opt"], missing_ok=["opt"])
    assert only_optional.batch_size == torch.Size([1])
    with pytest.raises(ValueError, match="missing_ok names 'y'"):
        tq.kv_batch_get(["a"], partition, ["x"], missing_ok=["y"])


def test_compat_reads_leave_out_what_is_missing(compat, partition, caplog):
    tq.kv_batch_put(["a", "b"], partition, batch(x=torch.arange(2)))
    with caplog.at_level(logging.WARNING):
        got = tq.kv_batch_get(["b", "gone", "a"], partition, ["x", "nope"])
    assert got["x"].tolist() == [1, 0]
    assert "gone" in caplog.text
    assert tq.kv_batch_get(["a"], partition, ["nope"]).batch_size == torch.Size([0])
    with pytest.raises(ValueError, match="none of the 1"):
        tq.kv_batch_get(["gone"], partition)
    with pytest.raises(ValueError, match="none of the"):
        tq.kv_batch_get(["a"], "no such partition")
    tq.kv_put("marker", partition, tag={})
    with pytest.raises(ValueError, match="not ready"):
        tq.kv_batch_get(["a", "marker"], partition, ["x"])


def test_get_by_meta_follows_the_meta(partition):
    meta = tq.kv_batch_put(["a", "b"], partition, batch(x=torch.arange(2), y=torch.arange(2)))
    meta.reorder([1, 0])
    assert tq.kv_batch_get_by_meta(meta)["x"].tolist() == [1, 0]
    assert tq.kv_batch_get_by_meta(meta, "y").keys() == {"y"}
    with pytest.raises(ValueError, match="'z'"):
        tq.kv_batch_get_by_meta(meta, ["z"])
    assert tq.kv_batch_get_by_meta(meta, ["x", "z"], missing_ok=["z"]).keys() == {"x"}
    unknown_fields = tq.KVBatchMeta(["a"], [{}], partition)
    assert tq.kv_batch_get_by_meta(unknown_fields, ["x"])["x"].tolist() == [0]
    assert tq.kv_batch_get_by_meta(tq.KVBatchMeta(partition_id=partition)).batch_size == torch.Size([0])
    with pytest.raises(ValueError, match="partition"):
        tq.kv_batch_get_by_meta(tq.KVBatchMeta(["a"], [{}]))


def test_cleared_rows_are_gone_and_others_stay(partition):
    tq.kv_batch_put(["a", "b", "c"], partition, batch(x=torch.arange(3)), tags=[{"n": i} for i in range(3)])
    tq.kv_put("marker", partition, tag={"status": "finished"})
    tq.kv_clear(["a", "marker", "never there"], partition)
    assert [*tq.kv_list(partition)[partition]] == ["b", "c"]
    with pytest.raises(KeyError, match="'a'"):
        tq.kv_batch_get(["a"], partition)
    assert tq.kv_batch_get(["c", "b"], partition)["x"].tolist() == [2, 1]
    tq.kv_clear(["b", "c"], partition)
    assert tq.kv_list(partition) == {partition: {}}
    tq.kv_clear("a", "no such partition")
    tq.kv_put("a", partition, {"x": "other kind"})
    assert tq.kv_list(partition) == {partition: {"a": {}}}


def test_partitions_do_not_mix(partition):
    tq.kv_put("a", f"{partition}-val", {"x": torch.ones(2)}, {"status": "success"})
    tq.kv_put("b", partition, {"x": torch.zeros(2)}, {"status": "success"})
    assert [*tq.kv_list(partition)[partition]] == ["b"]
    with pytest.raises(KeyError, match="'a'"):
        tq.kv_batch_get("a", partition)
    assert {partition, f"{partition}-val"} <= tq.kv_list().keys()
    assert tq.kv_list("no such partition") == {}


def test_a_dtype_conflict_is_refused_and_leaves_no_trace(partition):
    tq.kv_batch_put(["a"], partition, batch(x=torch.ones(1)), tags=[{"status": "old"}])
    with pytest.raises(tq.DtypeConflictError, match="'x'.*float32.*int64"):
        tq.kv_batch_put(["a", "b"], partition, batch(x=torch.ones(2, dtype=torch.int64)), tags=[{"status": "new"}] * 2)
    with pytest.raises(tq.DtypeConflictError, match="'x'.*float32.*object"):
        tq.kv_put("b", partition, {"x": "text"})
    assert tq.kv_list(partition) == {partition: {"a": {"status": "old"}}}
    assert tq.kv_batch_get("a", partition)["x"].tolist() == [1.0]


def test_replies_and_arguments_stay_the_callers(partition):
    tag = {"deep": [1]}
    meta = tq.kv_put("a", partition, tag=tag)
    tag["deep"].append(2)
    meta.tags[0]["deep"].append(3)
    tq.kv_list(partition)[partition]["a"]["deep"].append(4)
    tq.kv_watch(partition)[1]["a"]["deep"].append(5)
    assert tq.kv_list(partition)[partition]["a"] == {"deep": [1]}


def test_wrong_arguments_are_refused(partition):
    with pytest.raises(ValueError, match="nothing to put"):
        tq.kv_put("a", partition)
    with pytest.raises(ValueError, match="nothing to put"):
        tq.kv_batch_put(["a"], partition)
    with pytest.raises(ValueError, match="empty"):
        tq.kv_batch_put([], partition, tags=[])
    with pytest.raises(ValueError, match="empty"):
        tq.kv_clear([], partition)
    with pytest.raises(ValueError, match="empty"):
        tq.kv_batch_get([], partition)
    with pytest.raises(TypeError, match="a key is a string"):
        tq.kv_batch_put(["a", 1], partition, tags=[{}, {}])
    with pytest.raises(ValueError, match="1 tags for 2 keys"):
        tq.kv_batch_put(["a", "b"], partition, tags=[{}])
    with pytest.raises(ValueError, match="must differ"):
        tq.kv_batch_put(["a", "a"], partition, tags=[{}, {}])
    with pytest.raises(ValueError, match="batch size"):
        tq.kv_batch_put(["a", "b"], partition, batch(x=torch.ones(3)))
    with pytest.raises(ValueError, match="nested"):
        tq.kv_put("a", partition, {"x": jagged([1.0])})
    with pytest.raises(TypeError, match="field 'x', row 0"):
        tq.kv_put("a", partition, {"x": {1, 2}})
    assert tq.kv_list(partition) == {}


def double(fields: dict[str, list]) -> dict[str, list]:
    return {"x": [row.repeat(2) for row in fields["x"]], "text": [text.upper() for text in fields["text"]]}


def test_a_data_parser_runs_in_storage(partition):
    data = batch(x=jagged([1.0], [2.0, 3.0]), text=NonTensorStack("a", "b"))
    tq.kv_batch_put(["a", "b"], partition, data, data_parser=double)
    got = tq.kv_batch_get(["a", "b"], partition)
    assert got["x"].offsets().diff().tolist() == [2, 4]
    assert got.get("text").tolist() == ["A", "B"]
