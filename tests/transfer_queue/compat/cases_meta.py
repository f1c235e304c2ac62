"""`KVBatchMeta` and `BatchMeta`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from case_tools import batch, case, jagged
from tensordict import NonTensorStack


def kv_meta(tq: Any, names: str, **more: Any) -> Any:
    options = {"partition_id": "p", "fields": ["x"], "extra_info": {"step": 3}, **more}
    return tq.KVBatchMeta(keys=list(names), tags=[{"of": name} for name in names], **options)


@case
def kv_batch_meta(tq, see, partition):
    see("default", lambda: tq.KVBatchMeta())
    see("too few tags", lambda: tq.KVBatchMeta(keys=["a", "b"], tags=[{}]))
    see("keys without tags", lambda: tq.KVBatchMeta(keys=["a"]))
    see("duplicate keys", lambda: tq.KVBatchMeta(keys=["a", "a"], tags=[{}, {}]))
    see("duplicate fields", lambda: tq.KVBatchMeta(fields=["x", "x"]))
    see("extra_info None", lambda: tq.KVBatchMeta(extra_info=None))
    see("size", lambda: (kv_meta(tq, "abc").size, len(kv_meta(tq, "abc"))))
    see("select", lambda: kv_meta(tq, "abc").select_keys(["c", "a"]))
    see("select unknown", lambda: kv_meta(tq, "abc").select_keys(["d"]))
    see("select twice", lambda: kv_meta(tq, "abc").select_keys(["a", "a"]))
    see("select none", lambda: kv_meta(tq, "abc").select_keys([]))
    for parts in (1, 2, 3, 5):
        see(f"chunk {parts}", lambda parts=parts: kv_meta(tq, "abc").chunk(parts))
    see("chunk 0", lambda: kv_meta(tq, "abc").chunk(0))
    see("chunk an empty one", lambda: kv_meta(tq, "").chunk(2))
    meta = kv_meta(tq, "abc")
    see("reorder returns", lambda: meta.reorder([2, 0, 1]))
    see("reordered", lambda: meta)
    see("reorder too short", lambda: meta.reorder([0, 1]))
    see("reorder twice the same", lambda: meta.reorder([0, 0, 1]))
    see("reorder out of range", lambda: meta.reorder([0, 1, 3]))
    see("reorder negative", lambda: meta.reorder([0, 1, -1]))
    tag = {"deep": [1]}
    own = tq.KVBatchMeta(keys=["a"], tags=[tag], extra_info={"x": [1]})
    tag["deep"].append(2)
    see("tags are copied", lambda: own)


@case
def kv_batch_meta_concat(tq, see, partition):
    join = tq.KVBatchMeta.concat
    see("two", lambda: join([kv_meta(tq, "ab"), kv_meta(tq, "c")]))
    see("with an empty part", lambda: join([kv_meta(tq, ""), kv_meta(tq, "c")]))
    see("of nothing", lambda: join([]))
    see("of empty parts", lambda: join([kv_meta(tq, ""), kv_meta(tq, "")]))
    see("of an empty part with other partition", lambda: join([kv_meta(tq, "", partition_id="q"), kv_meta(tq, "c")]))
    see("of chunks", lambda: join(kv_meta(tq, "abcde").chunk(3)))
    see("other partition", lambda: join([kv_meta(tq, "a"), kv_meta(tq, "b", partition_id="q")]))
    see("other fields", lambda: join([kv_meta(tq, "a"), kv_meta(tq, "b", fields=["y"])]))
    swapped = [kv_meta(tq, "a", fields=["x", "y"]), kv_meta(tq, "b", fields=["y", "x"])]
    see("fields in another order", lambda: join(swapped))
    see("fields unknown in one", lambda: join([kv_meta(tq, "a"), kv_meta(tq, "b", fields=None)]))
    see("same key", lambda: join([kv_meta(tq, "a"), kv_meta(tq, "a")]))
    see("extra_info united", lambda: join([kv_meta(tq, "a"), kv_meta(tq, "b", extra_info={"more": 1})]))
    see("extra_info differs", lambda: join([kv_meta(tq, "a"), kv_meta(tq, "b", extra_info={"step": 4})]))
    see("no extra_info", lambda: join([kv_meta(tq, "a", extra_info={}), kv_meta(tq, "b", extra_info={})]))
    see("extra_info None", lambda: join([kv_meta(tq, "a", extra_info=None), kv_meta(tq, "b", extra_info=None)]))
    equal, other = {"t": torch.ones(2), "a": np.arange(2)}, {"t": torch.zeros(2)}
    first = kv_meta(tq, "a", extra_info=dict(equal))
    see("equal tensors", lambda: join([first, kv_meta(tq, "b", extra_info=dict(equal))]))
    see("other tensors", lambda: join([first, kv_meta(tq, "b", extra_info=other)]))


# -- BatchMeta -------------------------------------------------------------------------------------


def scalar(dtype: torch.dtype) -> dict[str, Any]:
    return {"dtype": dtype, "shape": torch.Size([1]), "is_nested": False, "is_non_tensor": False}


def nested(*lengths: int) -> dict[str, Any]:
    shapes = [torch.Size([n]) for n in lengths]
    return {"dtype": torch.int64, "shape": None, "is_nested": True, "is_non_tensor": False, "per_sample_shapes": shapes}


def meta_of(tq: Any, *rows: int, **more: Any) -> Any:
    options = {
        "partition_ids": ["p"] * len(rows),
        "field_schema": {"n": scalar(torch.int64), "ids": nested(*rows)},
        "production_status": np.ones(len(rows), np.int8),
        "extra_info": {"step": 3},
        "custom_meta": [{"of": row} for row in rows],
        **more,
    }
    return tq.BatchMeta(global_indexes=list(rows), **options)


@case
def batch_meta(tq, see, partition):
    see("whole", lambda: meta_of(tq, 4, 5, 6))
    see("without arguments", lambda: tq.BatchMeta())
    see("no rows", lambda: tq.BatchMeta([], []))
    see("empty", lambda: tq.BatchMeta.empty())
    see("empty with extra_info", lambda: tq.BatchMeta.empty({"x": 1}))
    see("too few partitions", lambda: tq.BatchMeta([1, 2], ["p"]))
    see("too few states", lambda: tq.BatchMeta([1, 2], ["p", "p"], production_status=np.ones(1, np.int8)))
    see("too few tags", lambda: tq.BatchMeta([1, 2], ["p", "p"], custom_meta=[{}]))
    see("default state", lambda: tq.BatchMeta([1], ["p"], {"n": scalar(torch.int64)}))
    see("select_samples", lambda: meta_of(tq, 4, 5, 6).select_samples([2, 0]))
    see("select no samples", lambda: meta_of(tq, 4, 5, 6).select_samples([]))
    see("select samples out of range", lambda: meta_of(tq, 4, 5, 6).select_samples([3]))
    see("select a sample twice", lambda: meta_of(tq, 4, 5, 6).select_samples([1, 1]))
    see("select_fields", lambda: meta_of(tq, 4, 5).select_fields(["ids", "nope"]))
    see("select no fields", lambda: meta_of(tq, 4, 5).select_fields([]))
    see("item", lambda: meta_of(tq, 4, 5, 6)[1])
    see("last item", lambda: meta_of(tq, 4, 5, 6)[-1])
    see("item out of range", lambda: meta_of(tq, 4, 5, 6)[3])
    see("slice", lambda: meta_of(tq, 4, 5, 6)[1:])
    see("item of a wrong type", lambda: meta_of(tq, 4, 5, 6)["n"])
    see("length", lambda: len(meta_of(tq, 4, 5, 6)))
    for parts in (1, 2, 5):
        see(f"chunk {parts}", lambda parts=parts: meta_of(tq, 4, 5, 6).chunk(parts))
    see("chunk by partition", lambda: meta_of(tq, 4, 5, 6, partition_ids=["p", "q", "p"]).chunk_by_partition())
    see("copy", lambda: meta_of(tq, 4, 5).copy())


@case
def batch_meta_reorder(tq, see, partition):
    meta = meta_of(tq, 4, 5, 6)
    see("returns", lambda: meta.reorder([2, 0, 1]))
    see("reordered", lambda: meta)
    see("too short", lambda: meta.reorder([0]))
    see("repeated", lambda: meta.reorder([0, 0, 1]))
    see("out of range", lambda: meta.reorder([0, 1, 3]))
    see("an empty one", lambda: tq.BatchMeta([], []).reorder([]))


@case
def batch_meta_entries(tq, see, partition):
    meta = meta_of(tq, 4, 5)
    see("dtypes", lambda: meta.get_dtypes("n"))
    see("dtypes of an unknown field", lambda: meta.get_dtypes("nope"))
    see("shapes", lambda: [list(shape) for shape in meta.get_shapes("ids")])
    see("shapes of an unknown field", lambda: meta.get_shapes("nope"))
    see("set", lambda: meta.set_extra_info("a", [1]))
    see("get", lambda: meta.get_extra_info("a"))
    see("get unknown", lambda: meta.get_extra_info("b"))
    see("get with a default", lambda: meta.get_extra_info("b", 7))
    see("has", lambda: (meta.has_extra_info("a"), meta.has_extra_info("b")))
    see("update", lambda: meta.update_extra_info({"b": 2}))
    see("all", lambda: meta.get_all_extra_info())
    see("remove", lambda: meta.remove_extra_info("b"))
    see("remove unknown", lambda: meta.remove_extra_info("b"))
    see("clear", lambda: meta.clear_extra_info())
    see("update tags", lambda: meta.update_custom_meta([{"new": 1}, {}]))
    see("tags", lambda: meta.get_all_custom_meta())
    see("too few tags", lambda: meta.update_custom_meta([{}]))
    see("clear tags", lambda: meta.clear_custom_meta())
    see("after all", lambda: meta)


@case
def batch_meta_join(tq, see, partition):
    join = tq.BatchMeta.concat
    see("two", lambda: join([meta_of(tq, 4, 5), meta_of(tq, 6)]))
    see("with an empty part", lambda: join([tq.BatchMeta([], []), meta_of(tq, 6)]))
    see("of nothing", lambda: join([]))
    see("of chunks", lambda: join(meta_of(tq, 4, 5, 6).chunk(2)))
    see("of more chunks than rows", lambda: join(meta_of(tq, 4, 5).chunk(3)))
    see("other fields", lambda: join([meta_of(tq, 4), meta_of(tq, 5, field_schema={"m": scalar(torch.int64)})]))
    one, other = {"n": scalar(torch.int64)}, {"n": scalar(torch.float32)}
    see("other dtypes", lambda: join([meta_of(tq, 4, field_schema=one), meta_of(tq, 5, field_schema=other)]))
    see("extra_info united", lambda: join([meta_of(tq, 4), meta_of(tq, 5, extra_info={"more": 1})]))
    see("extra_info differs", lambda: join([meta_of(tq, 4), meta_of(tq, 5, extra_info={"step": 4})]))
    see("uniform shapes that differ", lambda: join([_wide(tq, 4, 2), _wide(tq, 5, 3)]).get_shapes("w"))
    see("other partition", lambda: join([meta_of(tq, 4), meta_of(tq, 5, partition_ids=["q"])]).partition_ids)
    see("union", lambda: _left(tq).union(_right(tq)))
    see("union of other rows", lambda: _left(tq).union(meta_of(tq, 9)))
    see("union in another order", lambda: meta_of(tq, 4, 5).union(meta_of(tq, 5, 4)))
    newer = meta_of(tq, 4, extra_info={"step": 4})
    see("union of equal extra_info keys", lambda: meta_of(tq, 4).union(newer).extra_info)


def _wide(tq: Any, row: int, width: int) -> Any:
    schema = {"dtype": torch.int64, "shape": torch.Size([width]), "is_nested": False, "is_non_tensor": False}
    return meta_of(tq, row, field_schema={"w": schema})


def _left(tq: Any) -> Any:
    schema = {"a": scalar(torch.int64), "b": scalar(torch.int64)}
    return meta_of(tq, 4, 5, field_schema=schema, extra_info={"x": 1})


def _right(tq: Any) -> Any:
    status = np.array([1, 0], np.int8)
    return meta_of(
        tq, 4, 5, field_schema={"b": scalar(torch.float32)}, extra_info={"y": 2}, production_status=status,
        custom_meta=[{"k": 1}, {}],
    )  # fmt: skip


@case
def batch_meta_add_fields(tq, see, partition):
    columns = {"dense": torch.zeros(2, 3), "scalar": torch.zeros(2), "ragged": jagged([1.0], [1.0, 2.0])}
    data = batch(2, text=NonTensorStack("a", "b"), **columns)
    bare = {"field_schema": None, "production_status": None, "custom_meta": None, "extra_info": None}
    see("ready", lambda: meta_of(tq, 4, 5, **bare).add_fields(data))
    see("not ready", lambda: meta_of(tq, 4, 5, **bare).add_fields(data, set_all_ready=False))
    see("other size", lambda: meta_of(tq, 4, **bare).add_fields(data))
    see("returns itself", lambda: (lambda meta: meta.add_fields(data) is meta)(meta_of(tq, 4, 5, **bare)))
    sample = meta_of(tq, 4, 5).samples[0]
    see("a sample", lambda: (sample.global_index, sample.partition_id, int(sample.production_status)))
    see("tag of a sample", lambda: sample.custom_meta)
    see("fields of a sample", lambda: sorted(sample.fields))
