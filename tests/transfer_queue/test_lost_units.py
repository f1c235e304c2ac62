"""A storage unit that dies takes cells with it: which rows are told so, and what readers and writers get."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import rlflow.transfer_queue as tq
from rlflow.transfer_queue.capacity import Bounds
from rlflow.transfer_queue.column import FieldHead
from rlflow.transfer_queue.controller import TransferQueueController
from rlflow.transfer_queue.objects import pack, unpack
from rlflow.transfer_queue.settings import merge_config
from rlflow.transfer_queue.snapshot import Home, encode, freeze, thaw
from rlflow.transfer_queue.table import BlockHead, Table
from rlflow.transfer_queue.tags import pack_tags

pytestmark = pytest.mark.alone

LONG = 30.0


def block(unit: int, name: str, *fields: str, rows: int = 1) -> BlockHead:
    head = FieldHead("float32", np.ones((rows, 1), np.int64), None)
    return BlockHead(unit, name, {field: head for field in fields}, nbytes=100)


def filled() -> Table:
    """Row a: x and y in unit 0, z in unit 1; b: all in unit 1; c: only a tag."""
    table = Table()
    table.put(["a"], "p", [{"s": 1}], block(0, "w:0", "x", "y"))
    table.put(["a", "b"], "p", [{}, {"s": 2}], block(1, "w:1", "z", rows=2))
    table.put(["b"], "p", None, block(1, "v:2", "x"))
    table.put(["c"], "p", [{"s": 3}])
    return table


def test_the_rows_say_what_they_have_lost_until_they_have_it_again():
    table = filled()
    version = table.version("p")
    assert table.lose_unit(0, "killed") == ["p"]
    assert table.changes("p", version) == (version + 1, {"a": {"s": 1, "tq_lost": ["x", "y"]}})
    assert table.lose_unit(0, "told twice") == []
    table.put(["a"], "p", None, block(1, "w:3", "y"))
    assert table.changes("p", version + 1)[1] == {"a": {"s": 1, "tq_lost": ["x"]}}
    table.put(["a"], "p", [{"s": 4}], block(1, "w:4", "x"))
    assert table.changes("p", version + 2)[1] == {"a": {"s": 4}}
    assert table.locate(["a", "b"], "p", ["x", "z"], True).keys == ["a", "b"]
    table.lose_unit(1, "killed too")
    assert table.listing("p")["p"]["b"]["tq_lost"] == ["x", "z"]
    table.clear(["b"], "p")
    table.put(["b"], "p", [{"s": 5}])
    assert table.listing("p")["p"]["b"] == {"s": 5}
    assert table.nbytes == 0
    assert table.take_garbage() == {}, "the blocks went with their unit"


def test_reading_a_lost_field_names_unit_field_and_keys():
    table = filled()
    table.lose_unit(0, "node 10.0.0.7 left")
    with pytest.raises(tq.StorageUnitLostError, match=r"'x', 'y'.*'a'.*storage unit 0 \(node 10\.0\.0\.7 left\)"):
        table.locate(["a", "b"], "p", ["x"], True)
    with pytest.raises(KeyError):
        table.locate(["a"], "p", ["y"], True)
    assert [*table.locate(["a", "b"], "p", None, True).cells] == ["z"]
    assert [*table.locate(["a", "b"], "p", ["x", "z"], True, ["x"]).cells] == ["z"]
    assert [*table.locate(["a", "b"], "p", ["x", "z"], False).cells] == ["z"]
    with pytest.raises(tq.MissingFieldError, match="'never'"):
        table.locate(["a"], "p", ["never"], True)
    table.lose_unit(1, "too")
    with pytest.raises(tq.StorageUnitLostError):
        table.locate(["a"], "p", None, True)


def test_a_block_that_was_half_overwritten_is_lost_only_where_it_still_counts():
    table = Table()
    table.put(["a", "b"], "p", None, block(0, "w:0", "x", "y", rows=2))
    table.put(["a"], "p", None, block(1, "w:1", "x"))
    table.put(["b"], "p", None, block(1, "w:2", "x", "y"))
    table.lose_unit(0, "killed")
    assert table.listing("p") == {"p": {"a": {"tq_lost": ["y"]}, "b": {}}}


def test_a_put_into_a_lost_unit_is_refused():
    table = filled()
    table.lose_unit(0, "killed")
    with pytest.raises(tq.StorageUnitLostError, match=r"storage unit 0 \(killed\).*Put again"):
        table.put(["d"], "p", None, block(0, "w:9", "x"))
    assert "d" not in table.listing("p")["p"]


def test_a_given_up_writer_may_not_commit_any_more():
    table = filled()
    assert table.abandon("w") == ["w:0", "w:1"]
    with pytest.raises(tq.QueueUnavailableError, match="given up the writer"):
        table.put(["a"], "p", None, block(1, "w:9", "x"))
    table.put(["a"], "p", None, block(1, "v:9", "x", "y"))
    assert table.abandon("w") == ["w:1"]


def make_controller(**simple: int) -> TransferQueueController:
    config = merge_config({"backend": {"storage_backend": "Local", "SimpleStorage": simple}})
    return TransferQueueController(config, [None])


def test_waiters_and_watchers_see_the_loss():
    async def scenario() -> None:
        controller = make_controller()
        await controller.put(["a"], "p", pack_tags([{"s": 1}], ["a"]), block(0, "w:0", "x"))
        watching = asyncio.create_task(controller.watch("p", 1, LONG))
        await asyncio.sleep(0)
        await controller.unit_lost(0, "killed")
        assert (await watching).changed.dicts() == {"a": {"s": 1, "tq_lost": ["x"]}}
        await controller.unit_lost(0, "told twice")
        assert (await controller.watch("p", 2, 0.01)).version == 2

    asyncio.run(scenario())


def test_without_any_unit_left_the_table_says_so():
    async def scenario() -> None:
        controller = make_controller()
        await controller.put(["a"], "p", None, block(0, "w:0", "x"))
        await controller.unit_lost(0, "killed")
        with pytest.raises(tq.QueueUnavailableError, match=r"all 1 storage units.*killed"):
            await controller.put(["b"], "p", None, block(0, "w:1", "x"))
        await controller.put(["a"], "p", pack_tags([{"still": "works"}], ["a"]), None)

    asyncio.run(scenario())


def test_a_loss_makes_room():
    async def scenario() -> None:
        controller = make_controller(total_storage_bytes=150)
        await controller.put(["a"], "p", None, block(0, "w:0", "x"))
        waiting = asyncio.create_task(controller.put(["b"], "p", None, block(1, "w:1", "x")))
        await asyncio.sleep(0)
        assert not waiting.done()
        await controller.unit_lost(0, "killed")
        await asyncio.wait_for(waiting, LONG)

    asyncio.run(scenario())


def test_blocks_that_a_checkpoint_still_needs_are_not_taken_for_those_of_a_dead_writer():
    async def scenario() -> None:
        controller = make_controller()
        await controller.put(["a"], "p", None, block(0, "w:0", "x"))
        controller._held_back = {}  # as while a checkpoint is written
        await controller.clear(["a"], "p")
        assert await controller.abandon("w") == ["w:0"]

    asyncio.run(scenario())


def test_a_loss_survives_a_checkpoint():

    table = filled()
    table.lose_unit(0, "killed")
    plain = unpack(pack(encode(freeze(table))))
    thawed = thaw(plain, [Home(1, f"n:{i}", None) for i in range(len(plain["blocks"]))], Bounds(), 100)
    assert thawed.listing() == table.listing()
    with pytest.raises(tq.StorageUnitLostError):
        thawed.locate(["a"], "p", ["x"], True)
    thawed.put(["a"], "p", None, block(1, "w:9", "x", "y"))
    assert thawed.listing("p")["p"]["a"] == {"s": 1}
