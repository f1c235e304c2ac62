"""A bounded table: who waits for room, in which order, and who never does."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tensordict import TensorDict

import rlflow.transfer_queue as tq
from rlflow.transfer_queue.capacity import Bounds, RoomQueue
from rlflow.transfer_queue.settings import merge_config
from rlflow.utils.errors import ConfigError


@pytest.fixture
def bounded():
    """Creates a table in this process with given bounds."""

    def create(wait_s: float = 20.0, **bounds: int) -> None:
        tq.close()
        tq.init({"capacity_wait_s": wait_s, "backend": {"storage_backend": "Local", "SimpleStorage": bounds}})

    yield create
    tq.close()


def rows(count: int, numbers: int = 1) -> TensorDict:
    return TensorDict({"x": torch.zeros(count, numbers, dtype=torch.int64)}, batch_size=[count])


async def settle() -> None:
    """Lets the tasks send their calls, and the controller serve them."""
    for _ in range(3):
        await asyncio.sleep(0)
        await tq.async_kv_list()


def test_only_new_rows_with_fields_wait(bounded):
    bounded(total_storage_size=2)
    tq.kv_batch_put(["a", "b"], "train", rows(2))

    async def scenario() -> None:
        waiting = asyncio.create_task(tq.async_kv_batch_put(["c"], "train", rows(1)))
        await settle()
        assert not waiting.done()
        # None of these may wait, or who makes room could be stopped by what is waiting for room.
        await tq.async_kv_put("marker", "train", tag={"status": "pending"})
        await tq.async_kv_batch_put(["a", "b"], "train", rows(2))
        await tq.async_kv_batch_put(["a"], "train", TensorDict({"y": torch.ones(1)}, batch_size=[1]))
        await tq.async_kv_put("b", "train", tag={"status": "done"})
        await tq.async_kv_put("marker", "train", {"prompt": "a text"})
        assert not waiting.done()
        await tq.async_kv_clear(["a", "marker"], "train")
        await asyncio.wait_for(waiting, 10)

    asyncio.run(scenario())
    assert tq.kv_list()["train"].keys() == {"b", "c"}


def test_bytes_are_bounded_too(bounded):
    bounded(0.1, total_storage_bytes=1000)
    tq.kv_batch_put(["a", "b"], "train", rows(2, 50))  # 800 bytes
    with pytest.raises(tq.CapacityError, match=r"1 new rows.*400 bytes.*800 of at most 1,000 bytes.*total_storage_byt"):
        tq.kv_batch_put(["c"], "train", rows(1, 50))
    tq.kv_batch_put(["c"], "train", rows(1, 10))
    tq.kv_clear(["a"], "train")  # its block lives on for b
    with pytest.raises(tq.CapacityError):
        tq.kv_batch_put(["d"], "train", rows(1, 50))
    tq.kv_clear(["b"], "train")
    tq.kv_batch_put(["d"], "train", rows(1, 50))


def test_what_never_fits_is_refused_at_once_and_says_who_holds_the_room(bounded):
    bounded(1000.0, total_storage_size=2)
    tq.kv_batch_put(["a", "b"], "train", rows(2))
    with pytest.raises(tq.CapacityError, match=r"3 new rows for partition 'val'.*2 of at most 2.*'train': 2 rows"):
        tq.kv_batch_put(["d", "e", "f"], "val", rows(3))
    assert asyncio.run(tq.get_client().async_stats())["units"][0]["blocks"] == 1


@pytest.mark.parametrize("room", ["its row is made by a tag", "an overwrite makes room"])
def test_a_waiting_put_goes_on_when_another_put_lets_it(bounded, room):
    bounded(total_storage_bytes=64)
    tq.kv_batch_put(["a"], "train", rows(1, 8))

    async def scenario() -> None:
        waiting = asyncio.create_task(tq.async_kv_batch_put(["c"], "train", rows(1)))
        await settle()
        assert not waiting.done()
        if room.startswith("its"):
            await tq.async_kv_put("c", "train", tag={"status": "pending"})
        else:
            await tq.async_kv_batch_put(["a"], "train", rows(1, 1))
        await asyncio.wait_for(waiting, 5)

    asyncio.run(scenario())


def test_nobody_overtakes_a_waiting_put(bounded):
    bounded(total_storage_size=4)
    tq.kv_batch_put(list("abcd"), "train", rows(4))

    async def scenario() -> None:
        large = asyncio.create_task(tq.async_kv_batch_put(["l1", "l2", "l3"], "train", rows(3)))
        await settle()
        await tq.async_kv_clear(["a", "b"], "train")
        small = asyncio.create_task(tq.async_kv_batch_put(["s"], "train", rows(1)))
        await settle()
        assert not large.done()
        assert not small.done()  # it would fit, and so would the next one, and the large one would wait for ever
        await tq.async_kv_clear(["c"], "train")
        await asyncio.wait_for(large, 10)
        assert not small.done()
        await tq.async_kv_clear(["d"], "train")
        await asyncio.wait_for(small, 10)

    asyncio.run(scenario())
    assert tq.kv_list()["train"].keys() == {"l1", "l2", "l3", "s"}


def test_one_that_gives_up_lets_the_next_one_through(bounded):
    bounded(0.3, total_storage_size=4)
    tq.kv_batch_put(list("abc"), "train", rows(3))

    async def scenario() -> None:
        large = asyncio.create_task(tq.async_kv_batch_put(["l1", "l2"], "train", rows(2)))
        await settle()
        await asyncio.wait_for(tq.async_kv_batch_put(["s"], "train", rows(1)), 10)
        with pytest.raises(tq.CapacityError):
            await large

    asyncio.run(scenario())


def test_a_put_that_fails_when_its_turn_comes_tells_its_own_caller():
    async def scenario() -> None:
        queue: RoomQueue[int] = RoomQueue()
        room = [False]

        def fail() -> int:
            raise ValueError("mine")

        loop = asyncio.get_running_loop()
        first = asyncio.create_task(queue.commit(lambda: room[0], fail, loop.time() + 10))
        second = asyncio.create_task(queue.commit(lambda: room[0], lambda: 2, loop.time() + 10))
        await asyncio.sleep(0)
        room[0] = True
        queue.advance()
        assert await second == 2
        with pytest.raises(ValueError, match="mine"):
            await first

    asyncio.run(scenario())


def test_bounds():
    assert Bounds().fit(10**9, 10**15)
    assert Bounds(rows=2).fit(2, 10**15)
    assert not Bounds(rows=2).fit(3, 0)
    assert not Bounds(nbytes=2).fit(0, 3)
    with pytest.raises(ConfigError, match="total_storage_bytes=0"):
        merge_config({"backend": {"SimpleStorage": {"total_storage_bytes": 0}}})
