"""Sequences of calls on a table, the same for the public package and for ours.

A case is a function `case(tq, see, partition)`: `see(step, call)` records what a call gives. Cases are independent:
each has partitions of its own, named after the argument.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

CASES: dict[str, Callable[..., None]] = {}
# Settings of `controller` for the cases that need a table of their own: {name: settings(tq)}.
CONTROLLERS: dict[str, Callable[[Any], dict[str, Any]]] = {}


def case(function: Callable[..., None]) -> Callable[..., None]:
    """Add a case under its function's name."""
    CASES[function.__name__] = function
    return function


def polling_with(sampler: Callable[[Any], Any]) -> Callable[..., Any]:
    """Give a case a table in polling mode with the sampler `sampler(tq)`."""

    def keep(function: Callable[..., None]) -> Callable[..., None]:
        CONTROLLERS[function.__name__] = lambda tq: {"sampler": sampler(tq), "polling_mode": True}
        return function

    return keep


def jagged(*rows: list[float]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def batch(size: int, **fields: Any) -> TensorDict:
    return TensorDict(fields, batch_size=[size])


def numbers(*values: int) -> TensorDict:
    return batch(len(values), n=torch.tensor(values))


# -- names and arguments ---------------------------------------------------------------------------

FUNCTIONS = """
async_kv_batch_get async_kv_batch_get_by_meta async_kv_batch_put async_kv_clear async_kv_list async_kv_put close
get_client get_metrics_endpoint init kv_batch_get kv_batch_get_by_meta kv_batch_put kv_clear kv_list kv_put
""".split()
CLIENT = """
check_consumption_status check_production_status clear_partition clear_samples get_consumption_status get_data get_meta
get_partition_list get_production_status kv_list kv_retrieve_keys kv_retrieve_meta put reset_consumption set_custom_meta
""".split()
BATCH_META = """
add_fields chunk chunk_by_partition clear_custom_meta clear_extra_info concat copy empty get_all_custom_meta
get_all_extra_info get_dtypes get_extra_info get_shapes has_extra_info remove_extra_info reorder select_fields
select_samples set_extra_info union update_custom_meta update_extra_info __init__
""".split()
SAMPLER = "sample has_cached_result clear_cache save_checkpoint load_checkpoint __init__".split()


def arguments(function: Any) -> list[str]:
    """Names of the arguments that can be given by position; `socket` is plumbing of the public package."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters
    return [name for name, parameter in parameters.items() if parameter.kind in kinds and name != "socket"]


@case
def signatures(tq, see, partition):
    for name in FUNCTIONS:
        see(name, lambda name=name: arguments(getattr(tq, name)))
    for name in [*CLIENT, *(f"async_{name}" for name in CLIENT), "close", "initialize_storage_manager"]:
        see(f"client.{name}", lambda name=name: arguments(getattr(tq.get_client(), name)))
    for name in BATCH_META:
        see(f"BatchMeta.{name}", lambda name=name: arguments(getattr(tq.BatchMeta, name)))
    for name in ("select_keys", "reorder", "chunk", "concat", "__init__"):
        see(f"KVBatchMeta.{name}", lambda name=name: arguments(getattr(tq.KVBatchMeta, name)))
    for kind in ("SequentialSampler", "GRPOGroupNSampler", "RankAwareSampler", "SeqlenBalancedSampler"):
        for name in SAMPLER:
            see(f"{kind}.{name}", lambda kind=kind, name=name: arguments(getattr(getattr(tq, kind), name)))


# -- kv functions ----------------------------------------------------------------------------------


@case
def tags(tq, see, partition):
    see("first put", lambda: tq.kv_put("a", partition, tag={"status": "pending", "step": 1}))
    see("second put merges", lambda: tq.kv_put("a", partition, tag={"status": "running"}))
    see("batch put merges", lambda: tq.kv_batch_put(["a", "b"], partition, tags=[{"step": 2}, {"new": True}]))
    see("data put keeps tags", lambda: tq.kv_put("a", partition, {"n": torch.tensor(1)}))
    see("empty tag", lambda: tq.kv_put("c", partition, tag={}))
    see("nested values", lambda: tq.kv_put("a", partition, tag={"deep": {"x": [1, 2]}, "none": None, "f": 0.5}))
    see("list", lambda: tq.kv_list(partition))


@case
def put_arguments(tq, see, partition):
    see("neither fields nor tag", lambda: tq.kv_put("a", partition))
    see("neither fields nor tags", lambda: tq.kv_batch_put(["a"], partition))
    see("no keys", lambda: tq.kv_batch_put([], partition, tags=[]))
    see("key is no string", lambda: tq.kv_batch_put(["a", 1], partition, tags=[{}, {}]))
    see("one key is no string", lambda: tq.kv_put(1, partition, tag={}))
    see("too few tags", lambda: tq.kv_batch_put(["a", "b"], partition, tags=[{}]))
    see("too few rows", lambda: tq.kv_batch_put(["a", "b"], partition, numbers(1)))
    see("nested tensor in a dict", lambda: tq.kv_put("a", partition, {"x": jagged([1.0])}))
    see("empty dict of fields", lambda: tq.kv_put("e", partition, {}))
    see("empty dict of fields and a tag", lambda: tq.kv_put("e", partition, {}, tag={"s": 1}))
    see("list after all", lambda: tq.kv_list(partition))


@case
def repeated_keys_in_a_put(tq, see, partition):
    see("tags", lambda: tq.kv_batch_put(["a", "a"], partition, tags=[{"i": 1}, {"i": 2}]))
    see("fields", lambda: tq.kv_batch_put(["b", "b"], partition, numbers(1, 2)))
    see("list", lambda: tq.kv_list(partition))


@case
def one_row_as_a_dict(tq, see, partition):
    row = {
        "ids": torch.tensor([1, 2]),
        "scalar": torch.tensor(7),
        "text": "abc",
        "number": 3,
        "none": None,
        "list": [1, "x"],
        "dict": {"k": [1]},
        "array": np.arange(3),
        "matrix": torch.arange(6).reshape(2, 3),
    }
    see("put", lambda: tq.kv_put("a", partition, row, {"status": "success"}))
    for field in row:
        see(f"get {field}", lambda field=field: tq.kv_batch_get("a", partition, field))
    see("put a TensorDict", lambda: tq.kv_put("b", partition, numbers(5)))
    see("get it", lambda: tq.kv_batch_get("b", partition))
    see("put a TensorDict without rows", lambda: tq.kv_put("c", partition, TensorDict({"n": torch.tensor(6)}, [])))
    see("get the single row", lambda: tq.kv_batch_get("c", partition))


@case
def layouts(tq, see, partition):
    data = batch(
        3,
        score=torch.tensor([0.5, 1.5, 2.5]),
        flag=torch.tensor([True, False, True]),
        half=torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
        equal=torch.arange(6).reshape(3, 2),
        ragged=jagged([1.0], [2.0, 3.0], [4.0, 5.0, 6.0]),
        deep=torch.arange(12.0).reshape(3, 2, 2),
        text=NonTensorStack("x", "y", "z"),
        mixed=NonTensorStack(1, "two", None),
        dicts=NonTensorStack({"a": 1}, {"a": 2}, {}),
    )
    see("put", lambda: tq.kv_batch_put(["a", "b", "c"], partition, data))
    for field in sorted(data.keys()):
        see(f"get {field}", lambda field=field: tq.kv_batch_get(["c", "a", "b"], partition, field))
    see("one row of a ragged field", lambda: tq.kv_batch_get("b", partition, "ragged"))
    see("rows of equal length", lambda: tq.kv_batch_get(["a"], partition, ["ragged", "equal"]))


@case
def ragged_in_the_last_dimension(tq, see, partition):
    rows = [torch.arange(2 * n).reshape(2, n) for n in (3, 1)]
    tq.kv_put("a", partition, {"ids": rows[0]})
    tq.kv_put("b", partition, {"ids": rows[1]})
    see("get", lambda: tq.kv_batch_get(["b", "a"], partition))
    see("ragged dimension", lambda: tq.kv_batch_get(["b", "a"], partition)["ids"]._ragged_idx)


@case
def rows_of_different_kinds(tq, see, partition):
    tq.kv_put("a", partition, {"x": torch.tensor([1, 2]), "y": torch.tensor(1), "z": "text"})
    see("matrix beside vector", lambda: tq.kv_put("b", partition, {"x": torch.ones(2, 2, dtype=torch.int64)}))
    see("get both", lambda: tq.kv_batch_get(["a", "b"], partition, "x"))
    see("scalar beside vector", lambda: tq.kv_put("b", partition, {"y": torch.tensor([1, 2])}))
    see("get scalar and vector", lambda: tq.kv_batch_get(["a", "b"], partition, "y"))
    see("other dtype", lambda: tq.kv_put("b", partition, {"y": torch.tensor(1.5)}))
    see("get other dtype", lambda: tq.kv_batch_get("b", partition, "y"))
    see("tensor beside text", lambda: tq.kv_put("b", partition, {"z": torch.tensor([1])}))
    see("get tensor beside text", lambda: tq.kv_batch_get(["a", "b"], partition, "z"))


@case
def upsert(tq, see, partition):
    tq.kv_batch_put(["a", "b"], partition, batch(2, x=torch.tensor([1, 2]), y=jagged([1.0], [2.0, 3.0])))
    see("put one field", lambda: tq.kv_batch_put(["b"], partition, batch(1, x=torch.tensor([9]))))
    see("get", lambda: tq.kv_batch_get(["a", "b"], partition))
    see("put another field", lambda: tq.kv_batch_put(["a"], partition, batch(1, z=torch.tensor([3]))))
    see("fields all rows have", lambda: tq.kv_batch_put(["b", "a"], partition, tags=[{}, {}]))
    see("longer row", lambda: tq.kv_put("a", partition, {"y": torch.tensor([7.0, 8.0, 9.0])}))
    see("get all", lambda: tq.kv_batch_get(["a", "b"], partition))


@case
def missing_things(tq, see, partition):
    tq.kv_batch_put(["a", "b"], partition, batch(2, x=torch.tensor([1, 2]), text=NonTensorStack("p", "q")))
    tq.kv_batch_put(["a"], partition, batch(1, only_a=torch.tensor([3])))
    tq.kv_put("marker", partition, tag={"status": "pending"})
    see("unknown key between", lambda: tq.kv_batch_get(["b", "gone", "a"], partition))
    see("all keys unknown", lambda: tq.kv_batch_get(["gone", "lost"], partition))
    see("unknown partition", lambda: tq.kv_batch_get(["a"], f"{partition} none"))
    see("absent field beside a present one", lambda: tq.kv_batch_get(["a", "b"], partition, ["x", "nope"]))
    see("only absent fields", lambda: tq.kv_batch_get(["a", "b"], partition, ["nope"]))
    see("field of one row", lambda: tq.kv_batch_get(["a", "b"], partition, ["only_a"]))
    see("row with only a tag", lambda: tq.kv_batch_get("marker", partition))
    see("row with only a tag, field asked", lambda: tq.kv_batch_get("marker", partition, "x"))
    see("ready row and tag row", lambda: tq.kv_batch_get(["a", "marker"], partition, "x"))
    see("no keys", lambda: tq.kv_batch_get([], partition))
    see("key is no string", lambda: tq.kv_batch_get([1], partition))
    see("no fields selected", lambda: tq.kv_batch_get(["a"], partition, []))
    see("select by a string", lambda: tq.kv_batch_get(["a"], partition, "x"))
    see("same key twice", lambda: tq.kv_batch_get(["a", "b", "a"], partition, "x"))
    see("same field twice", lambda: tq.kv_batch_get(["a"], partition, ["x", "x"]))


@case
def get_by_meta(tq, see, partition):
    meta = tq.kv_batch_put(["a", "b"], partition, batch(2, x=torch.tensor([1, 2]), y=torch.tensor([3, 4])))
    meta.reorder([1, 0])
    see("in the order of the meta", lambda: tq.kv_batch_get_by_meta(meta))
    see("select", lambda: tq.kv_batch_get_by_meta(meta, ["y"]))
    see("select by a string", lambda: tq.kv_batch_get_by_meta(meta, "y"))
    see("select beyond the meta", lambda: tq.kv_batch_get_by_meta(meta, ["x", "z"]))
    bare = tq.KVBatchMeta(keys=["a"], tags=[{}], partition_id=partition)
    see("meta without fields", lambda: tq.kv_batch_get_by_meta(bare))
    see("select on a meta without fields", lambda: tq.kv_batch_get_by_meta(bare, ["x"]))
    see("meta without partition", lambda: tq.kv_batch_get_by_meta(tq.KVBatchMeta(keys=["a"], tags=[{}])))
    see("meta without rows", lambda: tq.kv_batch_get_by_meta(tq.KVBatchMeta(partition_id=partition)))


@case
def list_and_clear(tq, see, partition):
    tq.kv_batch_put(["c", "a", "b"], partition, numbers(1, 2, 3), tags=[{"i": 1}, {}, {"i": 3}])
    tq.kv_put("marker", partition, tag={"status": "finished"})
    see("creation order", lambda: list(tq.kv_list(partition)[partition].items()))
    see("unknown partition", lambda: tq.kv_list(f"{partition} none"))
    see("all partitions", lambda: partition in tq.kv_list())
    see("clear", lambda: tq.kv_clear(["a", "marker", "never there"], partition))
    see("rest", lambda: list(tq.kv_list(partition)[partition].items()))
    see("get a cleared key", lambda: tq.kv_batch_get(["a"], partition))
    see("get cleared and held", lambda: tq.kv_batch_get(["a", "b"], partition))
    see("clear by a string", lambda: tq.kv_clear("c", partition))
    see("clear only unknown keys", lambda: tq.kv_clear(["nobody"], partition))
    see("clear in no partition", lambda: tq.kv_clear("a", f"{partition} none"))
    see("clear no keys", lambda: tq.kv_clear([], partition))
    see("clear the last", lambda: tq.kv_clear(["b"], partition))
    see("empty partition", lambda: tq.kv_list(partition))
    see("partition still in all", lambda: tq.kv_list().get(partition))
    see("put again", lambda: tq.kv_put("a", partition, {"n": torch.tensor(9)}))
    see("get again", lambda: tq.kv_batch_get("a", partition))


@case
def partitions_do_not_mix(tq, see, partition):
    tq.kv_put("a", partition, {"n": torch.tensor(1)}, {"in": "one"})
    tq.kv_put("a", f"{partition} two", {"n": torch.tensor(2)}, {"in": "two"})
    see("one", lambda: tq.kv_batch_get("a", partition))
    see("two", lambda: tq.kv_batch_get("a", f"{partition} two"))
    tq.kv_clear("a", f"{partition} two")
    see("one stays", lambda: tq.kv_list(partition))


@case
def async_forms(tq, see, partition):
    see("put", lambda: tq.async_kv_put("a", partition, {"n": torch.tensor([1, 2])}, {"s": 1}))
    see("batch put", lambda: tq.async_kv_batch_put(["b"], partition, numbers(3), [{"s": 2}]))
    see("get", lambda: tq.async_kv_batch_get(["a"], partition))
    meta = tq.kv_batch_put(["b"], partition, tags=[{}])
    see("get by meta", lambda: tq.async_kv_batch_get_by_meta(meta))
    see("list", lambda: tq.async_kv_list(partition))
    see("clear", lambda: tq.async_kv_clear(["a", "b"], partition))
    see("list after", lambda: tq.async_kv_list(partition))


def _upper(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: [value.upper() for value in values] for name, values in fields.items()}


def _shorter(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: list(values)[:-1] for name, values in fields.items()}


def _other_fields(fields: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}2": values for name, values in fields.items()}


def texts(*values: str) -> TensorDict:
    return batch(len(values), text=NonTensorStack(*values))


@case
def data_parsers(tq, see, partition):
    # Sent by value, as a function of a script would be: the storage processes cannot import this file.
    see("put", lambda: tq.kv_batch_put(["a", "b"], partition, texts("x", "y"), data_parser=by_value(_upper)))
    see("get", lambda: tq.kv_batch_get(["b", "a"], partition))
    see("too short", lambda: tq.kv_batch_put(["c", "d"], partition, texts("x", "y"), data_parser=by_value(_shorter)))
    see("other fields", lambda: tq.kv_batch_put(["c"], partition, texts("x"), data_parser=by_value(_other_fields)))


def by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    copied = copy.copy(function)
    copied.__module__ = "__main__"
    return copied


# -- KVBatchMeta -----------------------------------------------------------------------------------


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
    see("fields in another order", lambda: join([kv_meta(tq, "a", fields=["x", "y"]), kv_meta(tq, "b", fields=["y", "x"])]))
    see("fields unknown in one", lambda: join([kv_meta(tq, "a"), kv_meta(tq, "b", fields=None)]))
    see("same key", lambda: join([kv_meta(tq, "a"), kv_meta(tq, "a")]))
    see("extra_info united", lambda: join([kv_meta(tq, "a"), kv_meta(tq, "b", extra_info={"more": 1})]))
    see("extra_info differs", lambda: join([kv_meta(tq, "a"), kv_meta(tq, "b", extra_info={"step": 4})]))
    see("no extra_info", lambda: join([kv_meta(tq, "a", extra_info={}), kv_meta(tq, "b", extra_info={})]))
    see("extra_info None", lambda: join([kv_meta(tq, "a", extra_info=None), kv_meta(tq, "b", extra_info=None)]))
    equal, other = {"t": torch.ones(2), "a": np.arange(2)}, {"t": torch.zeros(2)}
    see("equal tensors", lambda: join([kv_meta(tq, "a", extra_info=dict(equal)), kv_meta(tq, "b", extra_info=dict(equal))]))
    see("other tensors", lambda: join([kv_meta(tq, "a", extra_info=dict(equal)), kv_meta(tq, "b", extra_info=other)]))


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
    see("union of equal extra_info keys", lambda: meta_of(tq, 4).union(meta_of(tq, 4, extra_info={"step": 4})).extra_info)


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
    data = batch(
        2, dense=torch.zeros(2, 3), scalar=torch.zeros(2), ragged=jagged([1.0], [1.0, 2.0]), text=NonTensorStack("a", "b")
    )  # fmt: skip
    bare = {"field_schema": None, "production_status": None, "custom_meta": None, "extra_info": None}
    see("ready", lambda: meta_of(tq, 4, 5, **bare).add_fields(data))
    see("not ready", lambda: meta_of(tq, 4, 5, **bare).add_fields(data, set_all_ready=False))
    see("other size", lambda: meta_of(tq, 4, **bare).add_fields(data))
    see("returns itself", lambda: (lambda meta: meta.add_fields(data) is meta)(meta_of(tq, 4, 5, **bare)))
    sample = meta_of(tq, 4, 5).samples[0]
    see("a sample", lambda: (sample.global_index, sample.partition_id, int(sample.production_status), sample.custom_meta))
    see("fields of a sample", lambda: sorted(sample.fields))


# -- low-level client ------------------------------------------------------------------------------


@case
def insert_and_fetch(tq, see, partition):
    client = tq.get_client()
    meta = see("insert", lambda: client.get_meta(["n"], 2, partition, "insert", "task"))
    see("not ready yet", lambda: client.get_production_status(["n"], partition)[1])
    written = see("put", lambda: client.put(numbers(1, 2), meta))
    see("get of what put returned", lambda: client.get_data(written))
    see("ready now", lambda: client.get_production_status(["n"], partition)[1])
    fetched = see("fetch one", lambda: client.get_meta(["n"], 1, partition, "fetch", "task"))
    see("data", lambda: client.get_data(fetched))
    see("consumed", lambda: client.get_consumption_status("task", partition)[1])
    see("fetch the other", lambda: client.get_meta(["n"], 1, partition, "fetch", "task"))
    see("other task sees both", lambda: client.get_meta(["n"], 2, partition, "fetch", "other"))
    see("all consumed", lambda: client.check_consumption_status("task", partition))
    see("reset", lambda: client.reset_consumption(partition, "task"))
    see("fetch again", lambda: client.get_meta(["n"], 2, partition, "fetch", "task"))
    see("force_fetch", lambda: client.get_meta(["n"], 2, partition, "force_fetch", "task"))
    see("force_fetch of fewer", lambda: client.get_meta(["n"], 1, partition, "force_fetch", "task"))


@case
def get_meta_arguments(tq, see, partition):
    client = tq.get_client()
    client.put(numbers(1, 2, 3), partition_id=partition)
    see("unknown mode", lambda: client.get_meta(["n"], 1, partition, "steal", "task"))
    see("fetch without task", lambda: client.get_meta(["n"], 1, partition))
    see("force_fetch without task", lambda: client.get_meta(["n"], 1, partition, "force_fetch"))
    see("force_fetch of no partition", lambda: client.get_meta(["n"], 1, f"{partition} none", "force_fetch", "task"))
    see("force_fetch of an unknown field", lambda: client.get_meta(["nope"], 1, partition, "force_fetch", "task"))
    see("insert of nothing", lambda: client.get_meta(["n"], 0, partition, "insert"))
    see("fetch of nothing", lambda: client.get_meta(["n"], 0, partition, "fetch", "task"))


@case
def put_without_meta(tq, see, partition):
    client = tq.get_client()
    meta = see("put", lambda: client.put(numbers(1, 2, 3), partition_id=partition))
    see("type of row numbers", lambda: client.get_production_status(["n"], partition)[0].dtype)
    see("get", lambda: client.get_data(meta))
    see("get in another order", lambda: client.get_data(meta.select_samples([2, 0])))
    see("get one field", lambda: client.get_data(meta.select_fields(["n"])))
    see("no partition", lambda: client.put(numbers(1)))
    see("no rows", lambda: client.put(batch(0, n=torch.empty(0, dtype=torch.int64)), partition_id=partition))
    see("more fields", lambda: client.put(batch(3, m=torch.tensor([7, 8, 9])), meta))
    bare = tq.BatchMeta(meta.global_indexes, meta.partition_ids)
    see("returns the meta given", lambda: client.put(batch(3, k=torch.tensor([4, 5, 6])), bare) is bare)
    see("which has the new field", lambda: bare)
    see("wrong size", lambda: client.put(numbers(1), meta))
    other = client.put(numbers(8, 9), partition_id=f"{partition} two")
    both = tq.BatchMeta.concat([other.select_fields(["n"]), meta.select_samples([0]).select_fields(["n"])])
    see("get rows of two partitions", lambda: client.get_data(both))
    see("put into two partitions", lambda: client.put(numbers(5, 6, 7), both))
    see("get them", lambda: client.get_data(both))
    see("get an empty meta", lambda: client.get_data(tq.BatchMeta([], [])))
    see("listed keys", lambda: len(tq.kv_list(partition).get(partition, {})))
    see("partitions", lambda: partition in client.get_partition_list())
    see("rows in production", lambda: len(client.get_production_status(["n"], partition)[0]))


@case
def statuses(tq, see, partition):
    client = tq.get_client()
    see("production of no partition", lambda: client.get_production_status(["n"], partition))
    see("consumption of no partition", lambda: client.get_consumption_status("task", partition))
    see("checked production of no partition", lambda: client.check_production_status(["n"], partition))
    see("checked consumption of no partition", lambda: client.check_consumption_status("task", partition))
    see("reset of no partition", lambda: client.reset_consumption(partition))
    meta = client.put(numbers(1, 2), partition_id=partition)
    see("production", lambda: client.get_production_status(["n"], partition)[1])
    see("production of two fields", lambda: client.get_production_status(["n", "m"], partition)[1])
    see("production of no fields", lambda: client.get_production_status([], partition))
    see("checked production", lambda: client.check_production_status(["n"], partition))
    see("checked production of another field", lambda: client.check_production_status(["m"], partition))
    see("consumption", lambda: client.get_consumption_status("task", partition)[1])
    see("checked consumption", lambda: client.check_consumption_status("task", partition))
    client.get_meta(["n"], 2, partition, "fetch", "task")
    see("checked consumption after a fetch", lambda: client.check_consumption_status("task", partition))
    see("checked by another task", lambda: client.check_consumption_status("other", partition))
    see("reset all", lambda: client.reset_consumption(partition))
    see("checked after the reset", lambda: client.check_consumption_status("task", partition))
    client.put(batch(1, m=torch.tensor([5])), meta.select_samples([1]))
    see("production of the second field", lambda: client.get_production_status(["n", "m"], partition)[1])
    see("reset of an unknown task", lambda: client.reset_consumption(partition, "nobody"))


@case
def custom_meta(tq, see, partition):
    client = tq.get_client()
    meta = client.put(numbers(1, 2), partition_id=partition)
    meta.update_custom_meta([{"s": 1}, {"s": 2}])
    see("set", lambda: client.set_custom_meta(meta))
    see("fetched", lambda: client.get_meta(["n"], 2, partition, "force_fetch", "task"))
    meta.clear_custom_meta()
    meta.update_custom_meta([{"t": 3}, {}])
    see("set again", lambda: client.set_custom_meta(meta))
    see("fetched again", lambda: client.get_meta(["n"], 2, partition, "force_fetch", "task").get_all_custom_meta())
    keyed = client.kv_retrieve_meta(["a"], partition, create=True)
    keyed.update_custom_meta([{"k": 1}])
    client.set_custom_meta(keyed)
    see("tag of a key", lambda: tq.kv_list(partition)[partition]["a"])


@case
def stale_tags(tq, see, partition):
    client = tq.get_client()
    tq.kv_put("a", partition, tag={"status": "running"})
    stale = client.kv_retrieve_meta(["a"], partition)
    tq.kv_put("a", partition, tag={"status": "finished"})
    client.put(numbers(1), stale)
    see("tag after a data put with an old meta", lambda: tq.kv_list(partition)[partition]["a"])


@case
def clearing(tq, see, partition):
    client = tq.get_client()
    meta = client.put(numbers(1, 2, 3), partition_id=partition)
    see("clear samples", lambda: client.clear_samples(meta.select_samples([1])))
    see("left", lambda: client.get_production_status(["n"], partition)[1])
    see("get the rest", lambda: client.get_data(meta.select_samples([0, 2])))
    see("get a cleared sample", lambda: client.get_data(meta.select_samples([1])))
    see("clear twice", lambda: client.clear_samples(meta.select_samples([1])))
    see("clear an empty meta", lambda: client.clear_samples(tq.BatchMeta([], [])))
    tq.kv_put("a", partition, {"n": torch.tensor(5)}, {"s": 1})
    see("clear a partition", lambda: client.clear_partition(partition))
    see("list", lambda: tq.kv_list(partition))
    see("partitions", lambda: partition in client.get_partition_list())
    see("status", lambda: client.get_production_status(["n"], partition))
    see("clear no partition", lambda: client.clear_partition(f"{partition} none"))
    see("put again", lambda: client.put(numbers(8), partition_id=partition).size)
    see("get again", lambda: client.get_data(client.get_meta(["n"], 1, partition, "force_fetch", "task")))


@case
def reused_row_numbers(tq, see, partition):
    client = tq.get_client()
    first = client.put(numbers(1, 2), partition_id=partition)
    see("rows", lambda: see.rows(first.global_indexes))
    client.clear_samples(first)
    second = client.put(numbers(3, 4), partition_id=partition)
    see("rows of the next put", lambda: see.rows(second.global_indexes))
    see("get by the meta of cleared rows", lambda: client.get_data(first))


@case
def keys_and_rows(tq, see, partition):
    client = tq.get_client()
    tq.kv_batch_put(["a", "b"], partition, batch(2, n=torch.tensor([1, 2]), x=jagged([1.0], [2.0, 3.0])), [{"s": 1}, {}])
    meta = see("retrieve", lambda: client.kv_retrieve_meta(["b", "a"], partition))
    see("retrieve by a string", lambda: client.kv_retrieve_meta("a", partition).size)
    see("retrieve unknown", lambda: client.kv_retrieve_meta(["a", "gone"], partition))
    see("retrieve only unknown", lambda: client.kv_retrieve_meta(["gone"], partition))
    see("retrieve in no partition", lambda: client.kv_retrieve_meta(["a"], f"{partition} none"))
    see("create", lambda: client.kv_retrieve_meta(["new", "a"], partition, create=True))
    see("created is listed", lambda: list(tq.kv_list(partition)[partition]))
    see("data", lambda: client.get_data(meta))
    see("keys", lambda: client.kv_retrieve_keys(meta.global_indexes, partition))
    see("key of one row", lambda: client.kv_retrieve_keys(meta.global_indexes[0], partition))
    see("keys of unknown rows", lambda: client.kv_retrieve_keys([999_999], partition))
    see("keys in no partition", lambda: client.kv_retrieve_keys(meta.global_indexes, f"{partition} none"))
    anonymous = client.put(numbers(3), partition_id=partition)
    see("keys of a row without a key", lambda: len(client.kv_retrieve_keys(anonymous.global_indexes, partition)))
    see("list by the client", lambda: len(client.kv_list(partition)[partition]))
    see("list of all", lambda: partition in client.kv_list())


@case
def async_client(tq, see, partition):
    client = tq.get_client()
    put = see("put", lambda: client.async_put(numbers(1, 2), partition_id=partition))
    see("get", lambda: client.async_get_data(put))
    see("fetch", lambda: client.async_get_meta(["n"], 2, partition, "fetch", "task"))
    see("consumption", lambda: client.async_check_consumption_status("task", partition))
    see("production", lambda: client.async_check_production_status(["n"], partition))
    see("partitions", lambda: _has(client, partition))
    see("reset", lambda: client.async_reset_consumption(partition, "task"))
    see("set tags", lambda: client.async_set_custom_meta(put))
    see("keyed", lambda: client.async_kv_retrieve_meta(["a"], partition, create=True))
    see("list", lambda: client.async_kv_list(partition))
    see("clear samples", lambda: client.async_clear_samples(put))
    see("clear partition", lambda: client.async_clear_partition(partition))


async def _has(client: Any, partition: str) -> bool:
    return partition in await client.async_get_partition_list()


@case
def mixed_forms(tq, see, partition):
    client = tq.get_client()
    tq.kv_batch_put(["a", "b"], partition, numbers(1, 2), [{"s": 1}, {"s": 2}])
    meta = see("fetch keyed rows", lambda: client.get_meta(["n"], 2, partition, "fetch", "task"))
    see("their data", lambda: client.get_data(meta))
    see("consumed", lambda: client.get_consumption_status("task", partition)[1])
    tq.kv_put("c", partition, tag={"s": 3})
    see("a tag row is not ready", lambda: client.get_production_status(["n"], partition)[1])
    see("force_fetch with a tag row", lambda: client.get_meta(["n"], 2, partition, "force_fetch", "task"))
    tq.kv_clear(["a"], partition)
    see("after a clear", lambda: client.get_production_status(["n"], partition)[1])


# -- waiting for rows ------------------------------------------------------------------------------


@case
def too_few_rows(tq, see, partition):
    client = tq.get_client()
    client.put(numbers(1), partition_id=partition)
    see("fetch", lambda: client.get_meta(["n"], 2, partition, "fetch", "task"))
    see("nothing is consumed", lambda: client.get_consumption_status("task", partition)[1])
    see("fetch of no partition", lambda: client.get_meta(["n"], 1, f"{partition} none", "fetch", "task"))


@case
@polling_with(lambda tq: "SequentialSampler")
def polling_too_few_rows(tq, see, partition):
    client = tq.get_client()
    client.put(numbers(1), partition_id=partition)
    see("fetch", lambda: client.get_meta(["n"], 2, partition, "fetch", "task"))
    see("nothing is consumed", lambda: client.get_consumption_status("task", partition)[1])
    see("fetch of an unknown field", lambda: client.get_meta(["m"], 1, partition, "fetch", "task"))
    see("fetch of no partition", lambda: client.get_meta(["n"], 1, f"{partition} none", "fetch", "task"))
    client.put(numbers(2), partition_id=partition)
    see("fetch later", lambda: client.get_meta(["n"], 2, partition, "fetch", "task"))


# -- samplers --------------------------------------------------------------------------------------


def at(rank: int, index: int, **more: Any) -> dict[str, Any]:
    return {"dp_rank": rank, "batch_index": index, "task_name": "t", "partition_id": "p", **more}


@case
def sequential_sampler(tq, see, partition):
    sampler = tq.SequentialSampler()
    see("first rows", lambda: sampler.sample([3, 1, 2], 2))
    see("called", lambda: sampler([3, 1, 2], 2))
    see("too few", lambda: sampler.sample([1], 2))
    see("none", lambda: sampler.sample([], 2))
    see("keywords", lambda: sampler.sample([1, 2], 1, task_name="t", partition_id="p"))
    see("cached", lambda: sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 0}))
    see("state", lambda: sampler.save_checkpoint())


@case
def base_sampler(tq, see, partition):
    see("is abstract", lambda: tq.BaseSampler())

    class Last(tq.BaseSampler):
        def sample(self, ready_indexes, batch_size, *args, **kwargs):
            return ready_indexes[-batch_size:], ready_indexes[-batch_size:]

    sampler = Last()
    see("own sampler", lambda: sampler([1, 2, 3], 2))
    sampler._states = {"p": {"t": {0: {0: ([1], [1])}}}}
    see("cached", lambda: sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 0}))
    see("not cached", lambda: sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 1}))
    see("without dp_rank", lambda: sampler.has_cached_result("p", "t", {"batch_index": 0}))
    see("without batch_index", lambda: sampler.has_cached_result("p", "t", {"dp_rank": 0}))
    see("without config", lambda: sampler.has_cached_result("p", "t"))
    see("clear", lambda: sampler.clear_cache("p"))
    see("after clear", lambda: sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 0}))
    see("clear unknown", lambda: sampler.clear_cache("q"))


@case
def group_sampler(tq, see, partition):
    sampler = tq.GRPOGroupNSampler(n_samples_per_prompt=2)
    see("whole groups", lambda: sampler.sample([0, 1, 2, 3, 4, 5], 4))
    see("unsorted", lambda: sampler.sample([5, 0, 4, 1], 4))
    see("skips incomplete groups", lambda: sampler.sample([0, 2, 3, 5, 6], 4))
    see("too few groups", lambda: sampler.sample([0, 2, 3], 4))
    see("no multiple", lambda: sampler.sample([0, 1, 2, 3], 3))
    see("default n", lambda: tq.GRPOGroupNSampler().sample([3, 1, 2], 2))
    see("n of 0", lambda: tq.GRPOGroupNSampler(0))
    see("rank 0", lambda: sampler.sample([0, 1, 2, 3], 2, **at(0, 0)))
    see("rank 0 again", lambda: sampler.sample([2, 3], 2, **at(0, 0)))
    see("rank 1", lambda: sampler.sample([2, 3], 2, **at(1, 0)))
    see("cached", lambda: sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 0}))
    see("not cached", lambda: sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 1}))
    sampler.clear_cache("p")
    see("after clear", lambda: sampler.sample([2, 3], 2, **at(0, 0)))


@case
def rank_aware_sampler(tq, see, partition):
    sampler = tq.RankAwareSampler()
    see("first rank", lambda: sampler.sample([0, 1, 2, 3], 2, **at(0, 0)))
    see("same rank again", lambda: sampler.sample([2, 3], 2, **at(0, 0)))
    see("next batch", lambda: sampler.sample([2, 3], 2, **at(0, 1)))
    see("other rank", lambda: sampler.sample([4, 5], 2, **at(1, 0)))
    see("too few", lambda: sampler.sample([4], 2, **at(1, 1)))
    see("without rank", lambda: sampler.sample([4, 5], 2))
    see("cached", lambda: sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 1}))


class _Tags:
    """The status object a controller would pass: tags of rows."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self.custom_meta = {row: {"total_lengths": length} for row, length in enumerate(lengths)}

    def get_custom_meta(self, rows: list[int]) -> dict[int, dict[str, Any]]:
        return {row: self.custom_meta[row] for row in rows}


@case
def seqlen_sampler(tq, see, partition):
    sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2)
    state = _Tags([1, 1, 9, 9, 2, 2, 8, 8])
    see("rank 0", lambda: sampler.sample(list(range(8)), 4, **at(0, 0), partition=state))
    see("rank 1", lambda: sampler.sample([], 4, **at(1, 0), partition=state))
    see("rank 0 again", lambda: sampler.sample([], 4, **at(0, 0), partition=state))
    see("too few", lambda: sampler.sample([0, 1], 4, **at(0, 1), partition=state))
    see("without lengths", lambda: sampler.sample(list(range(8)), 2, **at(0, 2)))
    see("no multiple", lambda: sampler.sample(list(range(8)), 3, **at(0, 3), partition=state))
    see("cached", lambda: sampler.has_cached_result("p", "t", {"dp_rank": 1, "batch_index": 0}))


@case
def seqlen_sampler_shares(tq, see, partition):
    lengths = [9, 9, 1, 1, 5, 5, 2, 2, 7, 3, 4, 4, 6, 1, 8, 2]
    for ranks in (2, 4):
        sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=ranks)
        state = _Tags(lengths)
        for rank in range(ranks):
            size = len(lengths) // ranks
            see(f"{ranks} ranks, {rank}", lambda r=rank, s=size: sampler.sample(list(range(16)), s, **at(r, 0), partition=state))
        see(f"{ranks} ranks, without a rank", lambda: sampler.sample(list(range(16)), 4, partition=state))


def fetch(client: Any, partition: str, size: int, rank: int, index: int) -> list[int]:
    config = {"dp_rank": rank, "batch_index": index, "task_name": "task", "partition_id": partition}
    return client.get_meta(["n"], size, partition, "fetch", "task", config)


@case
@polling_with(lambda tq: tq.GRPOGroupNSampler(2))
def fetch_of_groups(tq, see, partition):
    client = tq.get_client()
    client.put(numbers(0, 1, 2, 3, 4), partition_id=partition)
    see("rank 0", lambda: client.get_data(fetch(client, partition, 2, 0, 0)))
    see("rank 0 again", lambda: client.get_data(fetch(client, partition, 2, 0, 0)))
    see("rank 1", lambda: client.get_data(fetch(client, partition, 2, 1, 0)))
    see("no whole group left", lambda: fetch(client, partition, 2, 0, 1))
    see("without a rank", lambda: client.get_meta(["n"], 2, partition, "fetch", "other").size)
    see("no multiple", lambda: client.get_meta(["n"], 3, partition, "fetch", "third"))
    client.clear_partition(partition)
    client.put(numbers(7, 8), partition_id=partition)
    see("after a clear", lambda: client.get_data(fetch(client, partition, 2, 0, 0)))


@case
@polling_with(lambda tq: tq.RankAwareSampler)
def fetch_by_rank(tq, see, partition):
    client = tq.get_client()
    client.put(numbers(0, 1, 2, 3), partition_id=partition)
    see("first of rank 0", lambda: client.get_data(fetch(client, partition, 2, 0, 0)))
    see("second of rank 0", lambda: client.get_data(fetch(client, partition, 2, 0, 0)))
    see("rank 1", lambda: client.get_data(fetch(client, partition, 2, 1, 0)))
    see("next batch", lambda: fetch(client, partition, 2, 0, 1))
    see("consumed", lambda: client.check_consumption_status("task", partition))
    see("without a rank", lambda: client.get_meta(["n"], 2, partition, "fetch", "other"))
    see("task left out", lambda: client.get_meta(["n"], 2, partition, "fetch", "o", {"dp_rank": 0, "batch_index": 0}).size)


@case
@polling_with(lambda tq: tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2))
def fetch_balanced(tq, see, partition):
    client = tq.get_client()
    meta = client.put(numbers(0, 1, 2, 3, 4, 5, 6, 7), partition_id=partition)
    meta.update_custom_meta([{"total_lengths": length} for length in (5, 5, 1, 1, 7, 7, 2, 2)])
    client.set_custom_meta(meta)
    see("rank 0", lambda: client.get_data(fetch(client, partition, 4, 0, 0)))
    see("rank 1", lambda: client.get_data(fetch(client, partition, 4, 1, 0)))
    see("nothing left", lambda: fetch(client, partition, 4, 0, 1))


def last_rows(tq: Any) -> Any:
    class Last(tq.BaseSampler):
        def sample(self, ready_indexes, batch_size, *args, **kwargs):
            return ready_indexes[-batch_size:], ready_indexes[-batch_size:]

    return Last()


@case
@polling_with(last_rows)
def own_sampler(tq, see, partition):
    client = tq.get_client()
    client.put(numbers(0, 1, 2, 3), partition_id=partition)
    see("last rows", lambda: client.get_data(client.get_meta(["n"], 3, partition, "fetch", "task")))
    see("too few", lambda: client.get_meta(["n"], 3, partition, "fetch", "task").size)
