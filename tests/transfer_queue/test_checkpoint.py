"""Saving a table under load, and getting it back: whole, or not at all."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

import rlflow.transfer_queue as tq
from rlflow.transfer_queue.capacity import Bounds
from rlflow.transfer_queue.column import FieldHead
from rlflow.transfer_queue.objects import pack, unpack
from rlflow.transfer_queue.snapshot import Home, encode, freeze, thaw
from rlflow.transfer_queue.table import BlockHead, Table
from rlflow.utils.errors import CheckpointError

LONG = 30.0
LOCAL = {"backend": {"storage_backend": "Local"}}


@pytest.fixture
def local():
    """A fresh table in this process."""
    tq.close()
    tq.init(LOCAL)
    yield
    tq.close()


def blocks_held() -> int:
    """Blocks in the storage of a table in this process, whether the table knows of them or not."""
    stats = asyncio.run(tq.get_client().async_stats())["units"]
    return sum(unit["private_blocks"] for unit in stats)


def fill() -> None:
    """Three rows in two puts each, a marker, and a row of another partition."""
    ragged = torch.nested.nested_tensor([torch.arange(n) for n in (1, 3, 2)], layout=torch.jagged)
    texts = NonTensorStack("one", "two", "three")
    tq.kv_batch_put(["m", "a", "b"], "train", tags=[{"is_prompt": True}, {"s": 1}, {}])
    tq.kv_batch_put(["a", "b", "c"], "train", TensorDict({"x": ragged, "t": texts}, batch_size=[3]))
    tq.kv_batch_put(["c", "b"], "train", TensorDict({"y": torch.tensor([3.0, 2.0])}, batch_size=[2]), [{"s": 3}, {}])
    tq.kv_put("other", "val", {"x": torch.ones(2)})
    asyncio.run(tq.get_client().async_mark_consumed("update", ["b"], "train"))


def everything() -> dict:
    """What a reader can see of `fill`."""
    client = tq.get_client()
    x = tq.kv_batch_get(["c", "a", "b"], "train", ["x", "t"])
    return {
        "tags": tq.kv_list(),
        "order": list(tq.kv_list("train")["train"]),
        "x": [row.tolist() for row in x["x"].unbind()],
        "t": x["t"].tolist(),
        "y": tq.kv_batch_get(["b", "c"], "train", ["y"])["y"].tolist(),
        "val": tq.kv_batch_get("other", "val")["x"].values().tolist(),
        "consumed": [part.tolist() for part in asyncio.run(client.async_get_consumption_status("update", "train"))],
        "lineage": tq.kv_lineage(["a", "b", "c"], "train"),
    }


def test_everything_comes_back(table, tmp_path):
    for partition, tags in tq.kv_list().items():
        if tags:
            tq.kv_clear(list(tags), partition)
    fill()
    before = everything()
    tq.save_checkpoint(tmp_path / "c", metadata={"step": 7})
    tq.kv_clear(["a", "m"], "train")
    tq.kv_put("new", "train", {"x": torch.zeros(9, dtype=torch.int64)})
    tq.kv_batch_put(["b"], "train", TensorDict({"y": torch.tensor([9.0])}, batch_size=[1]), [{"s": 9}])
    held = blocks_held()
    assert tq.load_checkpoint(tmp_path / "c") == {"step": 7}
    assert everything() == before
    assert blocks_held() <= held
    # It goes on as a table: a new row has a new number, dtypes are known, and blocks are freed.
    tq.kv_put("new", "train", {"x": torch.zeros(9, dtype=torch.int64)})
    indexes, _ = asyncio.run(tq.get_client().async_get_production_status(["x"], "train"))
    assert len(set(indexes.tolist())) == 5
    with pytest.raises(tq.DtypeConflictError):
        tq.kv_put("new", "train", {"x": torch.zeros(9)})
    for partition, tags in tq.kv_list().items():
        tq.kv_clear(list(tags), partition)
    assert blocks_held() == 0


def test_a_checkpoint_fits_any_number_of_units(ray_cluster, tmp_path):
    def units(count: int) -> dict:
        return {"backend": {"SimpleStorage": {"num_data_storage_units": count, "exact_unit_count": True}}}

    tq.close()
    tq.init(units(3))
    for i in range(6):
        tq.kv_put(f"k{i}", "train", {"x": torch.full((100,), i)})
    tq.save_checkpoint(tmp_path / "c")
    tq.close()
    tq.init(units(2))
    tq.load_checkpoint(tmp_path / "c")
    assert [row[0].item() for row in tq.kv_batch_get([f"k{i}" for i in range(6)], "train")["x"].unbind()] == [*range(6)]
    tq.close()


def test_a_checkpoint_under_writers_is_of_one_moment(table, partition, tmp_path):
    """Each writer puts number n into the tag and the fields of its rows, in one put after the other."""
    keys = {f"w{w}": [f"w{w}k{i}" for i in range(4)] for w in range(3)}
    stop = threading.Event()

    def put(writer: str, n: int) -> None:
        mine = keys[writer]
        tq.kv_batch_put(mine, partition, TensorDict({"x": torch.full((4,), n)}, batch_size=[4]), [{"n": n}] * 4)

    def write(writer: str) -> int:
        n = 1
        while not stop.is_set():
            put(writer, n)
            n += 1
        return n

    for writer in keys:
        put(writer, 0)
    with ThreadPoolExecutor(3) as pool:
        writers = [pool.submit(write, writer) for writer in keys]
        seen = []
        for number in range(3):
            tq.save_checkpoint(tmp_path / f"c{number}")
        stop.set()
        last = [writer.result(LONG) for writer in writers]
    assert min(last) > 3, "the writers were stopped"
    for number in range(3):
        tq.load_checkpoint(tmp_path / f"c{number}")
        tags = tq.kv_list(partition)[partition]
        for mine in keys.values():
            numbers = {tags[key]["n"] for key in mine}
            assert len(numbers) == 1
            assert set(tq.kv_batch_get(mine, partition)["x"].tolist()) == numbers
        seen.append(sum(tags[mine[0]]["n"] for mine in keys.values()))
    assert seen == sorted(seen)


def test_blocks_freed_during_a_save_are_freed_after_it(local, tmp_path):
    keys = [f"k{i}" for i in range(50)]
    for i, key in enumerate(keys):
        tq.kv_put(key, "train", {"x": torch.full((1000,), i)})

    async def scenario() -> None:
        # The save reaches the controller first, and lets others in as soon as it has its snapshot.
        saving = tq.get_client().async_save_checkpoint(str(tmp_path / "c"), True, None)
        await asyncio.gather(saving, tq.async_kv_clear(keys, "train"))

    asyncio.run(scenario())
    assert tq.kv_list("train") == {"train": {}}
    assert blocks_held() == 0
    tq.load_checkpoint(tmp_path / "c")
    assert [row[0].item() for row in tq.kv_batch_get(keys, "train")["x"].unbind()] == [*range(50)]


# -- watchers --------------------------------------------------------------------------------------


def test_a_watcher_of_the_former_table_is_told(local, tmp_path):
    tq.kv_put("a", "train", tag={"s": 1})
    tq.save_checkpoint(tmp_path / "c")
    version, _ = tq.kv_watch("train")
    with ThreadPoolExecutor(2) as pool:
        watching = pool.submit(tq.kv_watch, "train", version, LONG)
        waiting = pool.submit(tq.kv_wait, "train", keys=["a", "b"], predicate=tq.Predicate(2, tag="s"), timeout_s=LONG)
        tq.kv_list()
        tq.load_checkpoint(tmp_path / "c")
        with pytest.raises(tq.WatchGapError, match="from version 0"):
            watching.result(LONG)
        tq.kv_batch_put(["a", "b"], "train", tags=[{"s": 2}] * 2)
        assert waiting.result(LONG)[1].keys() == {"a", "b"}
    for since in range(1, 50):  # whatever version the former table had reached
        with pytest.raises(tq.WatchGapError):
            tq.kv_watch("train", since)
    restored, changes = tq.kv_watch("train", 0)
    assert changes == {"a": {"s": 2}, "b": {"s": 2}}
    tq.load_checkpoint(tmp_path / "c")
    with pytest.raises(tq.WatchGapError):
        tq.kv_watch("train", restored)


# -- what can go wrong -----------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x55
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty_state(path: Path) -> None:
    """A state with a right checksum that holds nothing."""
    metadata = json.loads((path.parent / "metadata.json").read_text())
    data = pack({"places": [], "sampler": None, "version": 0})
    path.write_bytes(data)
    metadata["state"] = {"nbytes": len(data), "crc32": zlib.crc32(data)}
    (path.parent / "metadata.json").write_text(json.dumps(metadata))


@pytest.mark.parametrize(
    ("name", "damage", "error"),
    [
        ("metadata.json", os.remove, FileNotFoundError),
        ("controller_state.msgpack", os.remove, FileNotFoundError),
        ("simple_storage/su_0.blocks", os.remove, FileNotFoundError),
        ("metadata.json", cut, CheckpointError),
        ("controller_state.msgpack", cut, CheckpointError),
        ("controller_state.msgpack", flip, CheckpointError),
        ("controller_state.msgpack", empty_state, CheckpointError),
        ("simple_storage/su_0.blocks", cut, CheckpointError),
        ("simple_storage/su_0.blocks", flip, CheckpointError),
    ],
)
def test_a_damaged_checkpoint_leaves_the_table_as_it_is(local, tmp_path, name, damage, error):
    fill()
    tq.save_checkpoint(tmp_path / "c")
    before, held = everything(), blocks_held()
    damage(tmp_path / "c" / name)
    with pytest.raises(error) as caught:
        tq.load_checkpoint(tmp_path / "c")
    assert isinstance(caught.value, tq.TableCheckpointError)
    assert str(tmp_path / "c") in str(caught.value)
    assert (everything(), blocks_held()) == (before, held)


def test_a_folder_that_is_no_checkpoint(local, tmp_path):
    with pytest.raises(FileNotFoundError, match="metadata.json"):
        tq.load_checkpoint(tmp_path)
    with pytest.raises(TypeError, match="JSON"):
        tq.save_checkpoint(tmp_path / "c", metadata={"x": object()})
    assert not list(tmp_path.iterdir())


@contextmanager
def small_disk(limit: int):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_save_that_fails_leaves_the_former_checkpoint(local, tmp_path):
    fill()
    before = everything()
    tq.save_checkpoint(tmp_path / "c")
    tq.kv_put("big", "train", {"x": torch.zeros(100_000, dtype=torch.int64)})
    with small_disk(100_000), pytest.raises(tq.TableCheckpointError, match="was not written"):
        tq.save_checkpoint(tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    tq.kv_clear("big", "train")
    tq.load_checkpoint(tmp_path / "c")
    assert everything() == before


def test_a_save_that_was_killed_between_its_renames(local, tmp_path):
    fill()
    before = everything()
    tq.save_checkpoint(tmp_path / "c")
    os.rename(tmp_path / "c", tmp_path / "c.old")
    (tmp_path / "c.tmp").mkdir()
    tq.load_checkpoint(tmp_path / "c")
    assert everything() == before
    tq.save_checkpoint(tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


@pytest.mark.parametrize("suffix", ["", ".tmp", ".old"])
def test_a_folder_of_something_else_is_never_replaced(local, tmp_path, suffix):
    fill()
    foreign = tmp_path / f"c{suffix}"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("all of it")
    with pytest.raises(tq.TableCheckpointError, match="holds something else"):
        tq.save_checkpoint(tmp_path / "c")
    with pytest.raises(tq.IncompleteCheckpointError):
        tq.load_checkpoint(tmp_path / "c")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.tex")] == [f"c{suffix}/thesis.tex"]


def test_storage_is_saved_even_when_it_is_not_asked_for(local, tmp_path):
    fill()
    before = everything()
    tq.save_checkpoint(tmp_path / "c", include_storage=False)
    tq.load_checkpoint(tmp_path / "c")
    assert everything() == before


# -- the metadata alone ----------------------------------------------------------------------------

steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "tag", "clear", "consume"]),
        st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3, unique=True),
        st.sets(st.sampled_from("xyz"), min_size=1),
        st.integers(0, 9),
    ),
    max_size=25,
)


def apply(table: Table, number: int, step: tuple) -> None:
    kind, keys, fields, value = step
    if kind == "put":
        shapes = np.array([[value + i] for i in range(len(keys))], np.int64)
        head = BlockHead(number % 3, f"w{number % 2}:{number}", {f: FieldHead("int64", shapes, None) for f in fields})
        table.put(keys, "p", None, head)
    elif kind == "tag":
        table.put(keys, "p", [{f"t{value % 3}": value}] * len(keys))
    elif kind == "clear":
        table.clear(keys, "p")
    elif known := [key for key in keys if key in table.partition("p").rows]:
        table.consume("task", table.indexes("p", known))


def view(table: Table) -> dict:
    """All that a client may learn of the table, blocks by their lineage instead of their place."""
    partition = table.partition("p")
    return {
        "tags": list(table.listing("p").get("p", {}).items()),
        "cells": {k: {f: (r.cell(f)[0].commit, r.cell(f)[1]) for f in r.fields} for k, r in partition.rows.items()},
        "fields": {name: (f.dtype, f.cells, f.ragged()) for name, f in partition.fields.items()},
        "live": {block.commit: block.live for block in table.blocks()},
        "bytes": table.nbytes,
        "consumed": [
            part.tolist() if isinstance(part, np.ndarray) else part for part in table.consumption("task", "p")
        ],
        "writers": {block.commit: block.writer for block in table.blocks()},
        "shapes": {key: table.describe([row.index], None, "p") for key, row in partition.rows.items()},
    }


@settings(deadline=None, max_examples=60)
@given(steps, steps)
def test_a_thawed_table_is_the_table(before, after):
    table = Table()
    for number, step in enumerate(before):
        apply(table, number, step)
    plain = unpack(pack(encode(freeze(table))))
    homes = [Home(0, f"new:{number}", None) for number in range(len(plain["blocks"]))]
    thawed = thaw(plain, homes, Bounds(), 100)
    assert view(thawed) == view(table)
    for number, step in enumerate(after, 1000):
        apply(table, number, step)
        apply(thawed, number, step)
    assert view(thawed) == view(table)
