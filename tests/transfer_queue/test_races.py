"""Several processes on the same rows at the same time: no write is lost, and a put is seen whole or not at all."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rlflow.transfer_queue as tq
from rlflow.utils.ray_utils import ray_get

pytestmark = pytest.mark.usefixtures("shared_ray_table")

MERGES = 60
ROWS = [f"r{i}" for i in range(4)]


def await_all(refs: list[Any]) -> list[Any]:
    return ray_get(refs, what="the racing processes", timeout_s=60)


def merge_tags(partition: str, name: str) -> None:
    for number in range(MERGES):
        tq.kv_put("row", partition, tag={f"{name}{number}": number, "last": name})


def put_field(partition: str, name: str) -> None:
    for number in range(MERGES // 4):
        tq.kv_put("row", partition, {name: torch.tensor([number])})


def test_processes_racing_on_one_row_lose_no_write(processes, partition):
    a, b = processes
    refs = [a.run.remote(merge_tags, partition, "a"), b.run.remote(merge_tags, partition, "b")]
    put_field(partition, "x")
    refs.append(a.run.remote(put_field, partition, "y"))
    await_all(refs)
    tag = tq.kv_list(partition)[partition]["row"]
    assert tag.pop("last") in ("a", "b")
    assert tag == {f"{name}{number}": number for name in "ab" for number in range(MERGES)}
    row = tq.kv_batch_get("row", partition)
    assert [int(row[name].values()[0]) for name in ("x", "y")] == [MERGES // 4 - 1] * 2


def put_pairs(partition: str, first: int, count: int) -> None:
    """Puts whose cells all hold one number."""
    for number in range(first, first + count):
        left = torch.full((len(ROWS), 300), number)
        right = torch.nested.as_nested_tensor([torch.full((1 + i,), number) for i in range(4)], layout=torch.jagged)
        tq.kv_batch_put(ROWS, partition, TensorDict({"left": left, "right": right}, batch_size=[len(ROWS)]))


def read_pairs(partition: str, count: int) -> int:
    """How many different numbers were seen; an error if two were seen in one read."""
    seen = set()
    for _ in range(count):
        got = tq.kv_batch_get(ROWS, partition)
        numbers = set(got["left"].values().unique().tolist()) | set(got["right"].values().unique().tolist())
        if len(numbers) != 1:
            raise AssertionError(f"one read saw the puts {numbers}")
        seen |= numbers
    return len(seen)


def test_a_reader_sees_a_put_whole_or_not_at_all(processes, partition):
    put_pairs(partition, 0, 1)
    refs = [writer.run.remote(put_pairs, partition, 1000 * i, 40) for i, writer in enumerate(processes, 1)]
    assert read_pairs(partition, 60) > 1
    await_all(refs)


def put_and_clear(partition: str, count: int) -> None:
    for number in range(count):
        tq.kv_batch_put(
            ROWS, partition, TensorDict({"x": torch.full((4, 50), number)}, batch_size=[4]), [{"n": number}] * 4
        )
        tq.kv_clear(ROWS, partition)


def read_or_miss(partition: str, count: int) -> int:
    """How often all rows were there; each read is whole or says that rows are missing."""
    found = 0
    for _ in range(count):
        try:
            got = tq.kv_batch_get(ROWS, partition, "x")
        except (tq.StorageKeyNotFoundError, tq.MissingFieldError):
            continue
        if len(got["x"].values().unique()) != 1:
            raise AssertionError("rows of two puts in one read")
        found += 1
    return found


def test_rows_may_be_cleared_and_put_again_while_others_read(processes, partition):
    writer, reader = processes
    refs = [writer.run.remote(put_and_clear, partition, 50), reader.run.remote(read_or_miss, partition, 50)]
    read_or_miss(partition, 50)
    await_all(refs)
    assert tq.kv_list(partition)[partition] == {}


def write_into_what_is_read(partition: str) -> None:
    tq.kv_batch_get(ROWS, partition)["x"].values().fill_(-7)


def sum_of(partition: str) -> int:
    return int(tq.kv_batch_get(ROWS, partition)["x"].values().sum())


def test_what_a_process_writes_into_its_result_no_other_sees(processes, partition):
    tq.kv_batch_put(ROWS, partition, TensorDict({"x": torch.ones(4, 5000, dtype=torch.int64)}, batch_size=[4]))
    mine = tq.kv_batch_get(ROWS, partition)["x"].values()
    for process in processes:
        await_all([process.run.remote(write_into_what_is_read, partition)])
    assert int(mine.sum()) == sum_of(partition) == 20_000
    assert await_all([process.run.remote(sum_of, partition) for process in processes]) == [20_000] * 2


SIZES = [0, 1, 700, 40_000, 40_000, 40_000, 300_000, 2_500_000]  # int64 a row: up to a block with memory of its own


def live_a_while(partition: str, name: str, steps: int) -> None:
    """Put rows of all sizes, overwrite, read and clear them in a random order; what is read must be what was put."""
    draw = random.Random(name)
    held: dict[str, tuple[int, int]] = {}
    for number in range(steps):
        key = f"{name}/{draw.randrange(6)}"
        action = draw.random()
        if action < 0.5 or not held:
            held[key] = draw.choice(SIZES), number
            tq.kv_put(key, partition, {"x": torch.full((held[key][0],), number), "n": torch.tensor(number)})
        elif action < 0.8:
            keys = draw.sample(sorted(held), draw.randint(1, len(held)))
            got = tq.kv_batch_get(keys, partition)
            for row, n, expected in zip(got["x"].unbind(), got["n"].tolist(), (held[k] for k in keys), strict=True):
                if n != expected[1] or row.shape != (expected[0],) or not bool((row == n).all()):
                    raise AssertionError(f"{keys} hold {n}, {tuple(row.shape)} instead of {expected}")
        elif key in held:
            tq.kv_clear(key, partition)
            del held[key]
    if held:
        tq.kv_clear(list(held), partition)


def live_in_threads(partition: str, name: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(live_a_while, partition, f"{name}{thread}", 30) for thread in range(4)]:
            done.result(60)


def blocks() -> int:
    return sum(unit["blocks"] for unit in asyncio.run(tq.get_client().async_stats())["units"])


def test_threads_of_several_processes_keep_apart(processes, partition):
    before = blocks()
    refs = [process.run.remote(live_in_threads, partition, f"p{i}") for i, process in enumerate(processes)]
    live_in_threads(partition, "here")
    await_all(refs)
    assert tq.kv_list(partition)[partition] == {}
    assert blocks() == before


# The last tests of the module: they end its table.


@pytest.mark.parametrize("memory", [{"shared_memory": False}, {"shared_memory_bytes": 6 << 20}], ids=["none", "little"])
def test_threads_keep_apart_with_less_shared_memory_than_they_need(processes, partition, memory):
    tq.close()
    await_all([process.run.remote(tq.close) for process in processes])
    tq.init({"backend": {"SimpleStorage": memory}})
    ref = processes[0].run.remote(live_in_threads, partition, "there")
    live_in_threads(partition, "here")
    await_all([ref])
    assert blocks() == 0
    tq.close()
