"""The low-level client: rows by number, statuses, and consumers that share a partition."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import rlflow.transfer_queue as tq

pytestmark = pytest.mark.usefixtures("table")


def jagged(*rows: list[float]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def numbers(*values: int) -> TensorDict:
    return TensorDict({"n": torch.tensor(values)}, batch_size=[len(values)])


def read(meta: tq.BatchMeta) -> list[int]:
    return tq.get_client().get_data(meta)["n"].tolist()


def test_keyed_rows_by_number(partition):
    client = tq.get_client()
    data = TensorDict({"x": jagged([1.0], [2.0, 3.0]), "n": torch.arange(2)}, batch_size=[2])
    tq.kv_batch_put(["a", "b"], partition, data, tags=[{"s": 1}, {"s": 2}])
    meta = client.kv_retrieve_meta(["b", "a"], partition)
    assert meta.is_ready
    assert meta.get_shapes("x") == [(2,), (1,)]
    assert meta.get_dtypes("n") == [torch.int64, torch.int64]
    assert meta.get_shapes("n") == [(1,), (1,)]
    assert meta.custom_meta == [{"s": 2}, {"s": 1}]
    assert read(meta) == [1, 0]
    assert client.kv_retrieve_keys(meta.global_indexes, partition) == ["b", "a"]
    with pytest.raises(tq.StorageKeyNotFoundError, match="'new'"):
        client.kv_retrieve_meta(["a", "new"], partition)
    created = client.kv_retrieve_meta(["new"], partition, create=True)
    assert not created.is_ready
    assert partition in client.get_partition_list()
    tq.kv_clear("a", partition)
    with pytest.raises(tq.StorageKeyNotFoundError):
        client.get_data(meta)


def test_rows_are_inserted_first_and_filled_later(partition):
    client = tq.get_client()
    meta = client.get_meta(["n"], 3, partition, mode="insert")
    assert not meta.is_ready
    assert meta.field_names == ["n"]
    assert client.get_production_status(["n"], partition)[1].tolist() == [[0], [0], [0]]
    client.put(numbers(5, 6), meta.select_samples([2, 0]))
    assert client.get_production_status(["n"], partition)[1].tolist() == [[1], [0], [1]]
    assert not client.check_production_status(["n"], partition)
    client.put(numbers(7), meta[1])
    assert client.check_production_status(["n"], partition)
    assert read(meta) == [6, 7, 5]


def test_rows_without_a_key_get_one(partition):
    client = tq.get_client()
    meta = client.put(numbers(1, 2), partition_id=partition)
    keys = client.kv_retrieve_keys(meta.global_indexes, partition)
    assert len(set(keys)) == 2
    assert [*tq.kv_list(partition)[partition]] == keys
    tq.kv_clear(keys[:1], partition)
    assert read(meta[1]) == [2]
    with pytest.raises(tq.StorageKeyNotFoundError, match="cleared"):
        client.get_data(meta)


def test_rows_of_two_partitions_in_one_meta(partition):
    client = tq.get_client()
    data = TensorDict(
        {"n": torch.arange(3), "x": jagged([1.0], [2.0, 3.0], [4.0]), "t": NonTensorStack("a", "b", "c")}, [3]
    )
    one = client.put(data, partition_id=partition)
    two = client.put(data, partition_id=f"{partition}-two")
    mixed = tq.BatchMeta.concat([two[2], one[:2], two[0]])
    got = client.get_data(mixed)
    assert got["n"].tolist() == [2, 0, 1, 0]
    assert [row.tolist() for row in got["x"].unbind()] == [[4.0], [1.0], [2.0, 3.0], [1.0]]
    assert got.get("t").tolist() == ["c", "a", "b", "a"]
    client.put(numbers(10, 11, 12, 13), mixed)
    assert read(one) == [11, 12, 2]
    assert read(two) == [13, 1, 10]


def test_tags_are_replaced_by_set_custom_meta_and_left_alone_by_a_put(partition):
    client = tq.get_client()
    tq.kv_put("a", partition, tag={"status": "running", "old": True})
    stale = client.kv_retrieve_meta("a", partition)
    tq.kv_put("a", partition, tag={"status": "finished"})
    client.put(numbers(1), stale)
    assert tq.kv_list(partition)[partition]["a"] == {"status": "finished", "old": True}
    version, _ = tq.kv_watch(partition)
    stale.clear_custom_meta()
    stale.update_custom_meta([{"new": 1}])
    client.set_custom_meta(stale)
    assert tq.kv_watch(partition, version, 10)[1] == {"a": {"new": 1}}


def test_a_partition_is_cleared_with_its_marks(partition):
    client = tq.get_client()
    client.put(numbers(1, 2), partition_id=partition)
    client.get_meta(["n"], 2, partition, task_name="update")
    version, held = tq.kv_watch(partition)
    client.clear_partition(partition)
    assert partition not in client.get_partition_list()
    assert tq.kv_list(partition) == {}
    assert tq.kv_watch(partition, version, 10)[1] == dict.fromkeys(held)
    client.put(numbers(3), partition_id=partition)
    assert partition in client.get_partition_list()
    assert client.get_consumption_status("update", partition)[1].tolist() == [0]
    client.clear_partition("no such partition")


def test_each_task_sees_every_row_once(partition):
    client = tq.get_client()
    client.put(numbers(*range(5)), partition_id=partition)
    assert read(client.get_meta(["n"], 2, partition, task_name="update")) == [0, 1]
    assert read(client.get_meta(["n"], 5, partition, task_name="reward")) == [0, 1, 2, 3, 4]
    assert read(client.get_meta(["n"], 3, partition, task_name="update")) == [2, 3, 4]
    assert client.check_consumption_status("update", partition)
    assert client.reset_consumption(partition, "update")
    assert not client.check_consumption_status("update", partition)
    assert client.check_consumption_status("reward", partition)
    assert read(client.get_meta(["n"], 1, partition, task_name="update")) == [0]
    keys = client.kv_retrieve_keys(client.get_production_status(["n"], partition)[0].tolist(), partition)
    client.mark_consumed("update", keys[1:], partition)
    assert client.check_consumption_status("update", partition)
    assert not client.reset_consumption("no such partition")


def test_a_row_is_ready_for_a_task_when_it_has_all_its_fields(partition):
    client = tq.get_client()
    meta = client.put(numbers(1, 2), partition_id=partition)
    client.put(TensorDict({"m": torch.tensor([7])}, batch_size=[1]), meta[1])
    both = client.get_meta(["n", "m"], 1, partition, task_name="update")
    assert both.global_indexes == meta.global_indexes[1:]
    assert read(client.get_meta(["n"], 1, partition, task_name="update")) == [1]
    everything = client.get_meta(["n", "m"], 0, partition, mode="force_fetch")
    assert everything.production_status.tolist() == [0, 1]


def test_cleared_and_lost_rows_are_not_fetched(partition):
    client = tq.get_client()
    meta = client.put(numbers(1, 2, 3), partition_id=partition)
    client.get_meta(["n"], 1, partition, task_name="update")  # opens the task's view
    client.clear_samples(meta[1])
    assert read(client.get_meta(["n"], 1, partition, task_name="update")) == [3]
    with pytest.raises(tq.FetchTimeoutError):
        client.get_meta(["n"], 1, partition, task_name="update", timeout_s=0.01)


def test_a_fetch_waits_for_its_last_row_while_others_are_served(partition):
    client = tq.get_client()
    client.put(numbers(1), partition_id=partition)
    got: list[int] = []
    waiter = threading.Thread(
        target=lambda: got.extend(read(client.get_meta(["n"], 3, partition, task_name="update", timeout_s=60)))
    )
    waiter.start()
    tq.kv_put("other", f"{partition}-other", {"n": torch.tensor(0)})
    client.put(numbers(2), partition_id=partition)
    assert tq.kv_list(f"{partition}-other")
    assert waiter.is_alive()
    meta = client.get_meta(["n"], 1, partition, mode="insert")
    client.put(numbers(3), meta)
    waiter.join(30)
    assert sorted(got) == [1, 2, 3]


def test_a_fetch_gives_up_at_its_deadline_and_says_what_there_was(partition):
    client = tq.get_client()
    client.put(numbers(1, 2), partition_id=partition)
    client.get_meta(["n"], 1, partition, task_name="update")
    start = time.monotonic()
    with pytest.raises(tq.FetchTimeoutError, match=r"'update' waited 0.05 s for 2 rows .* 2 rows are there, 2 .* 1 of"):
        client.get_meta(["n"], 2, partition, task_name="update", timeout_s=0.05)
    assert time.monotonic() - start < 20
    assert client.get_consumption_status("update", partition)[1].tolist() == [1, 0]


def test_a_reset_wakes_a_waiting_fetch(partition):
    asyncio.run(reset_wakes(partition))


async def reset_wakes(partition):
    client = tq.get_client()
    await client.async_put(numbers(1, 2), partition_id=partition)
    await client.async_get_meta(["n"], 2, partition, task_name="update")
    waiting = asyncio.create_task(client.async_get_meta(["n"], 2, partition, task_name="update", timeout_s=60))
    await asyncio.sleep(0)
    await client.async_reset_consumption(partition)
    assert (await waiting).size == 2


def test_consumers_of_one_task_never_share_a_row(partition):
    asyncio.run(race(partition))


async def race(partition):
    client, rows, consumers = tq.get_client(), 60, 12

    async def consume() -> list[int]:
        taken = []
        for _ in range(rows // consumers):
            meta = await client.async_get_meta(["n"], 1, partition, task_name="update", timeout_s=60)
            taken += meta.global_indexes
        return taken

    async def produce() -> None:
        for start in range(0, rows, 3):
            await client.async_put(numbers(start, start + 1, start + 2), partition_id=partition)

    taken = await asyncio.gather(*(consume() for _ in range(consumers)), produce())
    fetched = [row for part in taken[:-1] for row in part]
    assert len(fetched) == len(set(fetched)) == rows
    assert await client.async_check_consumption_status("update", partition)


def test_compat_statuses(compat, partition):
    client = tq.get_client()
    assert client.get_production_status(["n"], partition) == (None, None)
    assert client.get_consumption_status("update", partition) == (None, None)
    client.put(numbers(1), partition_id=partition)
    assert tq.kv_list(partition) == {partition: {}}
    assert client.kv_retrieve_meta(["gone"], partition).size == 0


def test_wrong_arguments_are_refused(partition):
    client = tq.get_client()
    meta = client.put(numbers(1), partition_id=partition)
    with pytest.raises(ValueError, match="no mode 'steal'; try one of fetch"):
        client.get_meta(["n"], 1, partition, mode="steal")
    with pytest.raises(ValueError, match="needs a task_name"):
        client.get_meta(["n"], 1, partition)
    with pytest.raises(ValueError, match="batch_size=0"):
        client.get_meta(["n"], 0, partition, task_name="update")
    with pytest.raises(TypeError, match="list of field names"):
        client.get_meta("n", 1, partition, task_name="update")
    with pytest.raises(TypeError, match="partition"):
        client.get_meta(["n"], 1, "", task_name="update")
    with pytest.raises(ValueError, match="no partition 'nowhere'"):
        client.get_meta(["n"], 1, "nowhere", mode="force_fetch")
    with pytest.raises(ValueError, match="2 rows, the metadata 1"):
        client.put(numbers(1, 2), meta)
    with pytest.raises(ValueError, match="partition_id"):
        client.put(numbers(1))
    with pytest.raises(TypeError, match="takes a TensorDict"):
        client.put({"n": [1]}, partition_id=partition)
    with pytest.raises(ValueError, match="no rows to write"):
        client.put(TensorDict({"n": torch.empty(0)}, batch_size=[0]), partition_id=partition)
    with pytest.raises(ValueError, match="not in 'MooncakeStore'"):
        client.initialize_storage_manager("MooncakeStore", {})


def test_sync_forms_have_the_arguments_of_the_async_ones(partition):
    client = tq.get_client()
    names = [name for name in dir(client) if name.startswith("async_") and hasattr(client, name.removeprefix("async_"))]
    assert len(names) >= 16
    for name in names:
        sync = getattr(client, name.removeprefix("async_"))
        assert sync.__name__ == name.removeprefix("async_")
        assert inspect.signature(sync) == inspect.signature(getattr(client, name))
        assert not inspect.iscoroutinefunction(sync)
