"""Names and arguments, and the `kv_*` functions."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from case_tools import batch, case, jagged, numbers, texts
from tensordict import NonTensorStack, TensorDict

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
