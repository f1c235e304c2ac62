"""Waiting for changes: who is woken, when, and with what."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict

import rlflow.transfer_queue as tq
from rlflow.utils.errors import DeadlineError

pytestmark = pytest.mark.usefixtures("table")

LONG = 30.0  # a wait that takes this long has missed its event


def test_a_watch_is_incremental(partition):
    tq.kv_batch_put(["a", "b"], partition, tags=[{"s": 1}, {"s": 2}])
    version, changes = tq.kv_watch(partition)
    assert changes == {"a": {"s": 1}, "b": {"s": 2}}
    tq.kv_put("b", partition, tag={"t": 3})
    tq.kv_clear("a", partition)
    version, changes = tq.kv_watch(partition, version, LONG)
    assert changes == {"b": {"s": 2, "t": 3}, "a": None}
    assert tq.kv_watch(partition, version, 0.05) == (version, {})
    assert tq.kv_watch(partition, 0, LONG)[1] == {"b": {"s": 2, "t": 3}}


def test_an_unchanged_partition_times_out_empty(partition):
    start = time.monotonic()
    assert tq.kv_watch("never written", 0, 0.2) == (0, {})
    assert 0.2 <= time.monotonic() - start < LONG / 2


def test_a_put_wakes_all_watchers_at_once(partition):
    async def scenario() -> float:
        watchers = [asyncio.create_task(tq.async_kv_watch(partition, 0, LONG)) for _ in range(20)]
        await asyncio.sleep(0)  # lets the tasks send their calls
        await tq.async_kv_list()  # served after these calls have arrived
        start = time.monotonic()
        await tq.async_kv_put("a", partition, tag={"s": 1})
        for version, changes in await asyncio.gather(*watchers):
            assert (version, changes) == (1, {"a": {"s": 1}})
        return time.monotonic() - start

    assert asyncio.run(scenario()) < LONG / 2


def test_watchers_do_not_hold_up_writers_nor_other_partitions(partition):
    async def scenario() -> None:
        idle = [asyncio.create_task(tq.async_kv_watch(f"{partition}-idle", 0, LONG)) for _ in range(50)]
        await asyncio.sleep(0)
        await asyncio.gather(*(tq.async_kv_put(f"k{i}", partition, tag={"n": i}) for i in range(50)))
        assert len((await tq.async_kv_list(partition))[partition]) == 50
        assert not any(task.done() for task in idle)
        await tq.async_kv_put("end", f"{partition}-idle", tag={})
        await asyncio.gather(*idle)

    asyncio.run(scenario())


def test_new_data_in_an_old_row_is_no_change(partition):
    tq.kv_put("a", partition, tag={"s": 1})
    version, _ = tq.kv_watch(partition)
    tq.kv_batch_put(["a"], partition, TensorDict({"x": torch.ones(1)}, batch_size=[1]))
    assert tq.kv_watch(partition, version, 0.05) == (version, {})


def test_a_watch_from_the_future_is_refused(partition):
    tq.kv_put("a", partition, tag={})
    with pytest.raises(tq.WatchGapError, match="from version 0"):
        tq.kv_watch(partition, 99, LONG)


def test_a_follower_sees_every_state_of_many_writers(partition):
    keys = [f"k{i}" for i in range(8)]

    def write(key: str) -> None:
        for n in range(20):
            tq.kv_put(key, partition, tag={key: n})
        tq.kv_put(key, partition, tag={"status": "finished"})

    held: dict = {}
    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(write, key) for key in keys]
        version = 0
        while sum((tag or {}).get("status") == "finished" for tag in held.values()) < len(keys):
            version, changes = tq.kv_watch(partition, version, LONG)
            assert changes
            held.update(changes)
        for future in done:
            future.result(LONG)
    assert held == {key: {key: 19, "status": "finished"} for key in keys}


def test_wait_for_some_and_for_all(partition):
    done = tq.Predicate(("finished", "failure"), count=2)
    tq.kv_batch_put(["a", "b", "c"], partition, tags=[{"status": "finished"}, {"status": "running"}, {}])
    with ThreadPoolExecutor(2) as pool:
        some = pool.submit(tq.kv_wait, partition, predicate=done, timeout_s=LONG)
        all_of = pool.submit(tq.kv_wait, partition, keys=["b", "d"], predicate=tq.Predicate("failure"), timeout_s=LONG)
        tq.kv_put("b", partition, tag={"status": "failure"})
        _, matching = some.result(LONG)
        assert matching == {"a": {"status": "finished"}, "b": {"status": "failure"}}
        assert not all_of.done()
        tq.kv_put("d", partition, tag={"status": "failure"})
        assert all_of.result(LONG)[1].keys() == {"b", "d"}


def test_a_key_that_stops_matching_no_longer_counts(partition):
    tq.kv_put("a", partition, tag={"status": "finished"})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(tq.kv_wait, partition, predicate=tq.Predicate("finished", 2), timeout_s=LONG)
        tq.kv_clear("a", partition)
        tq.kv_put("b", partition, tag={"status": "finished"})
        tq.kv_put("c", partition, tag={"status": "finished"})
        matching = waiting.result(LONG)[1]
    assert {"b", "c"} <= matching.keys()


def test_wait_can_look_at_new_changes_only(partition):
    tq.kv_put("old", partition, tag={"status": "finished"})
    version, _ = tq.kv_watch(partition)
    tq.kv_put("new", partition, tag={"status": "finished"})
    _, matching = tq.kv_wait(partition, predicate=tq.Predicate("finished", 1), since_version=version, timeout_s=LONG)
    assert matching.keys() == {"new"}


def test_a_wait_that_fails_says_what_was_missing(partition):
    tq.kv_batch_put(["a", "b"], partition, tags=[{"status": "finished"}, {"status": "running"}])
    with pytest.raises(DeadlineError) as error:
        tq.kv_wait(partition, keys=["a", "b", "c"], predicate=tq.Predicate("finished"), timeout_s=0.1)
    for part in (repr(partition), "1 of 3 keys", "status in ('finished')", "b: 'running'", "c: not there"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="nothing to count"):
        tq.kv_wait(partition, predicate=tq.Predicate("finished"), timeout_s=1)
    with pytest.raises(ValueError, match="3 matches among 1"):
        tq.kv_wait(partition, keys=["a"], predicate=tq.Predicate("finished", 3), timeout_s=1)
    with pytest.raises(ValueError, match="count=0"):
        tq.Predicate("finished", 0)


# -- threads and loops ---------------------------------------------------------------------------


def test_sync_and_async_forms_from_many_threads(partition):
    barrier = threading.Barrier(8)

    def sync_worker(i: int) -> None:
        barrier.wait(LONG)
        for n in range(10):
            tq.kv_put(f"s{i}-{n}", partition, {"x": torch.full((n + 1,), float(i))}, {"i": i})
            assert tq.kv_batch_get(f"s{i}-{n}", partition)["x"].values().tolist() == [float(i)] * (n + 1)

    def async_worker(i: int) -> None:
        barrier.wait(LONG)

        async def run() -> None:
            await asyncio.gather(
                *(
                    tq.async_kv_put(f"a{i}-{n}", partition, {"x": torch.full((n + 1,), float(i))}, {"i": i})
                    for n in range(10)
                )
            )
            got = await tq.async_kv_batch_get([f"a{i}-{n}" for n in range(10)], partition)
            assert got["x"].offsets().diff().tolist() == list(range(1, 11))

        asyncio.run(run())

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(sync_worker if i % 2 else async_worker, i) for i in range(8)]
        for future in futures:
            future.result(60)
    assert len(tq.kv_list(partition)[partition]) == 80


def test_concurrent_tag_and_data_puts_of_one_row_keep_both(partition):
    async def scenario() -> None:
        puts = []
        for n in range(25):
            puts.append(tq.async_kv_put("a", partition, tag={f"t{n}": n}))
            puts.append(tq.async_kv_put("a", partition, {f"f{n}": torch.tensor([n])}))
        await asyncio.gather(*puts)

    asyncio.run(scenario())
    assert tq.kv_list(partition)[partition]["a"] == {f"t{n}": n for n in range(25)}
    got = tq.kv_batch_get("a", partition)
    assert {name: got[name].values().tolist() for name in got.keys()} == {f"f{n}": [n] for n in range(25)}  # noqa: SIM118


def test_readers_never_see_half_of_a_put(partition):
    def rows(n: int) -> TensorDict:
        return TensorDict({"x": torch.full((4,), n), "y": torch.full((4, 3), n)}, batch_size=[4])

    keys = list("abcd")
    tq.kv_batch_put(keys, partition, rows(0))
    stop = threading.Event()

    def write() -> None:
        for n in range(1, 60):
            tq.kv_batch_put(keys, partition, rows(n))
        stop.set()

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        while not stop.is_set():
            got = tq.kv_batch_get(keys, partition)
            assert len({*got["x"].tolist(), *got["y"].values().tolist()}) == 1
        writer.result(LONG)


def test_the_sync_form_works_while_a_loop_runs_in_the_thread(partition):
    async def scenario() -> dict:
        tq.kv_put("a", partition, {"x": torch.ones(2)}, {"s": 1})
        return tq.kv_list(partition)

    assert asyncio.run(scenario()) == {partition: {"a": {"s": 1}}}
