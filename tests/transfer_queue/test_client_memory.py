"""What a put leaves in shared memory, when it does without, and when the memory comes back."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rlflow.transfer_queue as tq

MB = 1 << 20


@pytest.fixture
def table(ray_cluster: None) -> Iterator[Callable[..., None]]:
    """Makes a table with these options of SimpleStorage."""

    def make(**options: Any) -> None:
        tq.close()
        tq.init({"backend": {"SimpleStorage": options}})

    yield make
    tq.close()


def batch(number: int, rows: int = 8, width: int = 1000) -> TensorDict:
    values = torch.arange(rows * width).view(rows, width) + number
    return TensorDict({"x": values, "y": values.float()}, batch_size=[rows])


def put(number: int, **size: int) -> list[str]:
    data = batch(number, **size)
    keys = [f"k{number}-{i}" for i in range(data.batch_size[0])]
    tq.kv_batch_put(keys, "train", data)
    return keys


def is_whole(keys: list[str], number: int, **size: int) -> bool:
    got, wanted = tq.kv_batch_get(keys, "train"), batch(number, **size)
    return all(torch.equal(got[name].values(), wanted[name].view(-1)) for name in ("x", "y"))


def units() -> dict[str, int]:
    """Sums over the units."""
    stats = asyncio.run(tq.get_client().async_stats())["units"]
    return {key: sum(unit.get(key, 0) for unit in stats) for key in stats[0]}


def until(true: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_beyond_the_limit_data_goes_through_messages_and_nothing_is_lost(table, messages):
    table(shared_memory_bytes=2 * MB, shared_memory_idle_seconds=0.2)
    held = {number: put(number, rows=4, width=10_000) for number in range(10)}  # 480 KB each
    assert units()["segment_bytes"] <= 2 * MB
    assert units()["private_blocks"] > 0
    assert "write" in messages
    assert all(is_whole(keys, number, rows=4, width=10_000) for number, keys in held.items())
    for keys in held.values():
        tq.kv_clear(keys, "train")
    until(lambda: units()["private_bytes"] == 0 == units()["segment_bytes"])
    # Now there is room again.
    keys = put(11)
    messages.clear()
    assert is_whole(keys, 11)
    assert messages == ["locate_packed"]


def test_without_shared_memory_everything_works_by_messages(table, messages):
    table(shared_memory=False, num_data_storage_units=3, exact_unit_count=True)
    keys = put(0)
    assert is_whole(keys, 0)
    assert messages.count("write") == messages.count("read") == 1
    assert "lease" not in messages
    mixed = [key for trio in zip(keys, put(100), put(200), strict=True) for key in trio]
    got = tq.kv_batch_get(mixed, "train")  # rows of three units in turn
    assert messages.count("read") == 1 + 3
    assert [row[0].item() for row in got["x"].unbind()] == [1000 * i + n for i in range(8) for n in (0, 100, 200)]
    got = tq.kv_batch_get(keys, "train")
    got["x"].values().zero_()  # what came in a message may be written to as well
    assert is_whole(keys, 0)


def test_memory_that_cannot_be_seen_from_here_is_done_without(table, messages, caplog):
    table()
    seen = put(0)
    storage = tq.get_client()._storage
    right = dict(storage._addresses)
    # As in a container that shares the node but not its processes.
    storage._addresses.update({unit: (address._replace(pid=2**22), True) for unit, (address, _) in right.items()})
    storage.leave_segments(0.0)
    keys = put(1)
    assert is_whole(keys, 1) and is_whole(seen, 0)
    assert "not visible" in caplog.text
    assert messages.count("write") == 1
    storage._addresses.update(right)
    assert is_whole(keys, 1) and is_whole(seen, 0)


@pytest.mark.parametrize("width", [1000, 400_000])  # in a common segment, and in one of its own
def test_a_refused_or_cancelled_put_leaves_nothing(table, width):
    table(shared_memory_idle_seconds=0.2)
    put(0)

    async def cancelled() -> None:
        for turn in range(6):
            task = asyncio.create_task(tq.async_kv_batch_put(list("abcdefgh"), "train", batch(1, width=width)))
            await asyncio.sleep(0.001 * turn)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancelled())
    with pytest.raises(tq.DtypeConflictError):
        tq.kv_batch_put(["z"], "train", TensorDict({"x": torch.ones(1, width)}, batch_size=[1]))
    tq.kv_clear([*tq.kv_list("train")["train"]], "train")
    until(lambda: units()["segment_bytes"] == 0)


def test_idle_memory_goes_back_to_the_machine(table):
    table(shared_memory_idle_seconds=0.2)
    small, large = put(0), put(1, rows=4, width=600_000)
    assert units()["segment_bytes"] > 28 * MB
    view = tq.kv_batch_get(large, "train", "x")
    tq.kv_clear(small + large, "train")
    until(lambda: 0 < units()["segment_bytes"] == units()["pinned_bytes"])
    assert torch.equal(view["x"].values(), batch(1, rows=4, width=600_000)["x"].view(-1))
    del view
    until(lambda: units()["segment_bytes"] == 0)
    assert is_whole(put(2), 2)


def test_a_small_result_does_not_hold_a_large_segment(table):
    table()
    keys = put(0, rows=4, width=600_000)
    got = tq.kv_batch_get(keys[:1], "train", "x")  # 4.8 of 29 MB: a view
    assert got["x"].values().numel() == 600_000
    small = put(1, width=10)
    few = tq.kv_batch_get(small, "train")
    tq.kv_clear(keys + small, "train")
    tq.get_client()._storage.leave_segments(0.0)
    until(lambda: units()["pinned_bytes"] == units()["segment_bytes"] - units()["free_bytes"] > 28 * MB)
    del got
    until(lambda: units()["pinned_bytes"] == 0)
    assert few["x"].values().numel() == 80


def test_segments_are_used_again(table):
    table()
    for number in range(60):
        keys = put(number, width=20_000)  # 1.9 MB
        assert is_whole(keys, number, width=20_000)
        tq.kv_clear(keys, "train")
    assert units()["segment_bytes"] < 200 * MB


def test_a_forked_child_is_told_to_connect_itself(table):
    table()
    put(0)
    client = tq.get_client().direct()
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            from rlflow.transfer_queue.ports import drive

            drive(client._storage.write("x:0", {}, None))
        except tq.QueueUnavailableError as error:
            os.write(sender, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"forked child" in os.read(receiver, 1000)
    os.close(receiver)
    os.close(sender)
    assert is_whole(put(1), 1)


def test_threads_that_meet_new_units_at_once_keep_their_numbers(table):
    table(num_data_storage_units=3, exact_unit_count=True)
    put(0)
    client = tq.get_client()._storage

    class Slow(list):
        def __getitem__(self, number):
            time.sleep(0.01)
            return super().__getitem__(number)

    endpoint = {"units": Slow(port.handle for port in client._plain_ports), "idle_s": 60.0}
    fresh = type(client)({"units": [], "idle_s": 60.0}, 5.0, "w")
    threads = [threading.Thread(target=fresh.meet, args=(endpoint,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [port.handle for port in fresh._plain_ports] == list(endpoint["units"])
