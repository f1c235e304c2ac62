"""The low-level client."""

from __future__ import annotations

from typing import Any

import torch
from case_tools import batch, case, jagged, numbers, polling_with


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
    data = batch(2, n=torch.tensor([1, 2]), x=jagged([1.0], [2.0, 3.0]))
    tq.kv_batch_put(["a", "b"], partition, data, [{"s": 1}, {}])
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
    # In sorted order: which row comes first depends on the numbers that the public package has left over.
    meta = client.get_meta(["n"], 2, partition, "fetch", "task")
    see("tags of fetched keyed rows", lambda: sorted(tag["s"] for tag in meta.get_all_custom_meta()))
    see("their data", lambda: sorted(client.get_data(meta)["n"].tolist()))
    see("consumed", lambda: client.get_consumption_status("task", partition)[1])
    tq.kv_put("c", partition, tag={"s": 3})
    see("a tag row is not ready", lambda: sorted(client.get_production_status(["n"], partition)[1].flatten().tolist()))
    everything = client.get_meta(["n"], 2, partition, "force_fetch", "task")
    see("ready rows beside a tag row", lambda: sorted(int(ready) for ready in everything.production_status))
    see("shapes beside a tag row", lambda: [list(shape) for shape in everything.get_shapes("n")])
    tq.kv_clear(["a"], partition)
    see("after a clear", lambda: sorted(client.get_production_status(["n"], partition)[1].flatten().tolist()))


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
