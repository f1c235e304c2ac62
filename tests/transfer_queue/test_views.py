"""What a reader holds is its own: neither recycled memory, nor other readers, nor the end of the table change it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rlflow.transfer_queue as tq

ROWS, LENGTH = 64, 4096  # 2 MiB a column
KEYS = [f"k{i}" for i in range(ROWS)]


def batch(number: int) -> TensorDict:
    """Two columns that nobody else's batch equals."""
    values = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) + 10_000_000 * number
    lengths = torch.arange(ROWS) + 1
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ragged = torch.nested.nested_tensor_from_jagged(torch.arange(int(offsets[-1])) - number, offsets)
    return TensorDict({"x": values, "y": ragged}, batch_size=[ROWS])


def put(partition: str, number: int, prefix: str = "") -> list[str]:
    keys = [f"{prefix}{key}" for key in KEYS]
    tq.kv_batch_put(keys, partition, batch(number))
    return keys


def same(got: TensorDict, number: int) -> bool:
    want = batch(number)
    return torch.equal(got["x"].values().view(ROWS, LENGTH), want["x"]) and torch.equal(
        got["y"].values(), want["y"].values()
    )


def check(partition: str, keys: list[str], number: int) -> bool:
    return same(tq.kv_batch_get(keys, partition), number)


def pass_through(partition: str, length: int, count: int, filler: int) -> None:
    """Put and clear batches of one column, one after the other, which takes memory that others have left."""
    keys = [f"filler {i}" for i in range(ROWS)]
    for _ in range(count):
        values = torch.full((ROWS, length), filler)
        tq.kv_batch_put(keys, partition, TensorDict({"x": values}, batch_size=[ROWS]))
        tq.kv_clear(keys, partition)


@pytest.mark.parametrize("held", ["everything", "a slice", "part of the rows"])
@pytest.mark.parametrize(
    ("length", "before", "after"), [(4096, 60, 100), (40_000, 1, 6)], ids=["2 MB blocks", "20 MB blocks"]
)
def test_held_views_outlive_rows_and_recycled_memory(table, partition, held, length, before, after):
    pass_through(partition, length, before, -1)  # until the segments have the size that they keep
    want = torch.arange(ROWS * length).reshape(ROWS, length)
    tq.kv_batch_put(KEYS, partition, TensorDict({"x": want}, batch_size=[ROWS]))
    keys, rows = (KEYS[10:20], slice(10, 20)) if held == "part of the rows" else (KEYS, slice(None))
    got, want = tq.kv_batch_get(keys, partition)["x"].values().view(-1, length), want[rows]
    if held == "a slice":
        got, want = got[3, 7:11], want[3, 7:11]
    tq.kv_clear(KEYS, partition)
    for _ in range(3):
        pass_through(partition, length, after // 3, -2)
        assert torch.equal(got, want)


def test_upserts_do_not_change_what_was_read(table, partition):
    keys = put(partition, 1)
    got = tq.kv_batch_get(keys, partition)
    for number in range(2, 12):
        put(partition, number)
        assert same(got, 1)
    assert check(partition, keys, 11)


def test_writing_into_what_was_read_changes_nothing_for_others(table, partition):
    keys = put(partition, 1)
    first, second = (tq.kv_batch_get(keys, partition) for _ in range(2))
    for name in ("x", "y"):
        first[name].values().fill_(-7)
    assert same(second, 1)
    assert check(partition, keys, 1)


def test_writing_into_the_source_after_a_put_changes_nothing(table, partition):
    data = batch(3)
    tq.kv_batch_put(KEYS, partition, data)
    data["x"].fill_(-1)
    data["y"].values().fill_(-1)
    assert same(tq.kv_batch_get(KEYS, partition), 3)


def test_many_readers_in_one_process_hold_many_views(table, partition):
    keys = put(partition, 1)

    async def read_often() -> list[Any]:
        return await asyncio.gather(*(tq.async_kv_batch_get(keys, partition) for _ in range(16)))

    held = asyncio.run(read_often())
    tq.kv_clear(keys, partition)
    put(partition, 2)
    assert all(same(got, 1) for got in held)
