"""A storage unit without Ray: blocks in, blocks out, files, and the care for what others left."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from rlflow.transfer_queue.block import BlockView, Draft, gather, runs_of
from rlflow.transfer_queue.codec import decode_batch, encode_batch
from rlflow.transfer_queue.column import heads_from_bytes, heads_of, heads_to_bytes
from rlflow.transfer_queue.errors import StorageKeyNotFoundError, TransferQueueError
from rlflow.transfer_queue.storage import register_storage_backend, storage_backend
from rlflow.transfer_queue.storage_local import LocalStorageClient, LocalStorageHost
from rlflow.transfer_queue.storage_unit import StorageUnit, start_of_process
from rlflow.utils.errors import CheckpointError, ConfigError

ME = (os.getpid(), start_of_process(os.getpid()))


@pytest.fixture(params=[True, False], ids=["shared", "private"])
def unit(request: pytest.FixtureRequest) -> StorageUnit:
    return StorageUnit("node", request.param)


def batch(lengths: list[int], start: int = 0) -> TensorDict:
    rows = [torch.arange(start, start + n) for n in lengths]
    return TensorDict(
        {
            "jagged": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
            "dense": torch.arange(len(lengths) * 6, dtype=torch.float32).view(-1, 2, 3) + start,
            "scalar": torch.arange(len(lengths)) + start,
            "text": NonTensorStack(*[f"row {start + i}" for i in range(len(lengths))]),
        },
        batch_size=[len(lengths)],
    )


def write(unit: StorageUnit, block_id: str, data: TensorDict) -> tuple:
    extent, heads = unit.write(block_id, Draft(encode_batch(data, data.batch_size[0])).to_array())
    assert heads is None
    return block_id, extent


def cells(fields: list[str], which: list[int], places: list[int]) -> dict:
    return dict.fromkeys(fields, (np.array(which, np.int32), np.array(places, np.int32)))


def test_rows_of_several_blocks_come_in_the_order_asked_for(unit):
    blocks = [write(unit, "w:0", batch([2, 1, 3])), write(unit, "w:1", batch([4, 5], 10))]
    fields = ["jagged", "dense", "scalar", "text"]
    data = unit.read(blocks, cells(fields, [1, 0, 0, 1], [1, 2, 0, 0]))
    got = decode_batch(BlockView(data).columns(), 4)
    assert [row.tolist() for row in got["jagged"].unbind()] == [[*range(10, 15)], [0, 1, 2], [0, 1], [*range(10, 14)]]
    assert got["scalar"].tolist() == [11, 2, 0, 10]
    assert got.get("text").tolist() == ["row 11", "row 2", "row 0", "row 10"]
    assert got["dense"].unbind()[1].tolist() == [[12.0, 13.0, 14.0], [15.0, 16.0, 17.0]]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.data())
def test_gathered_rows_are_the_rows(lengths, data):
    view = BlockView(Draft(encode_batch(batch(lengths), len(lengths))).to_array())
    places = np.array(data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=15)))
    runs = runs_of(np.zeros(len(places), np.int64), places)
    columns = {name: gather([view], name, runs) for name in ("jagged", "dense", "scalar", "text")}
    got = decode_batch(columns, len(places))
    assert [row.tolist() for row in got["jagged"].unbind()] == [[*range(lengths[i])] for i in places]
    assert got["scalar"].tolist() == places.tolist()
    assert got.get("text").tolist() == [f"row {i}" for i in places]


def test_heads_survive_the_way_to_the_controller_and_are_small():
    columns = encode_batch(batch([1, 2, 3]), 3)
    columns |= {f"again{i}": columns["jagged"] for i in range(20)}
    data = heads_to_bytes(heads_of(columns))
    back = heads_from_bytes(data)
    assert back.keys() == columns.keys()
    for name, column in columns.items():
        assert np.array_equal(back[name].shapes, column.shapes)
        assert (back[name].dtype, back[name].ragged) == (column.dtype, column.ragged)
    uniform = TensorDict({"x": torch.zeros(100_000, 3)}, batch_size=[100_000])
    assert len(heads_to_bytes(heads_of(encode_batch(uniform, 100_000)))) < 50


def test_what_was_freed_is_gone(unit):
    block = write(unit, "w:0", batch([1]))
    kept = write(unit, "w:1", batch([2]))
    unit.free(["w:0", "unknown:1"])
    if unit.describe()[1]:
        unit.free(["w:1"])  # in one segment: its last block
        assert unit.read([kept], cells(["scalar"], [0], [0])) is None
    assert unit.read([block], cells(["scalar"], [0], [0])) is None


def test_a_block_without_the_field_is_no_answer(unit):
    block = write(unit, "w:0", batch([1]))
    assert unit.read([block], cells(["nope"], [0], [0])) is None


def test_bytes_that_are_no_block_are_refused():
    with pytest.raises(TransferQueueError, match="no block"):
        BlockView(np.zeros(100, np.uint8))


def test_a_parser_runs_in_the_unit_and_its_heads_come_back(unit):
    data = Draft(encode_batch(batch([2, 3]), 2)).to_array()
    extent, heads = unit.write("w:0", data, lambda fields: {**fields, "jagged": [row[:1] for row in fields["jagged"]]})
    assert heads["jagged"].shapes.tolist() == [[1], [1]]
    got = unit.read([("w:0", extent)], cells(["jagged"], [0, 0], [0, 1]))
    assert decode_batch(BlockView(got).columns(), 2)["jagged"].values().tolist() == [0, 0]


def test_blocks_move_through_a_file_to_another_unit(unit, tmp_path):
    blocks = [write(unit, f"w:{i}", batch([i + 1, 2], i)) for i in range(3)]
    path = str(tmp_path / "blocks")
    entries = unit.export_blocks(blocks[1:], path)
    other = StorageUnit("node", True)
    extents = other.import_blocks(path, entries)
    assert extents.keys() == {"w:1", "w:2"}
    got = BlockView(other.read([*extents.items()], cells(["jagged"], [1], [0]))).columns()
    assert decode_batch(got, 1)["jagged"].values().tolist() == [2, 3, 4]
    damaged = bytearray((tmp_path / "blocks").read_bytes())
    damaged[entries[1][1] + 40] ^= 1
    (tmp_path / "blocks").write_bytes(damaged)
    with pytest.raises(CheckpointError, match="w:2"):
        other.import_blocks(path, entries)
    with pytest.raises(StorageKeyNotFoundError, match="w:9"):
        unit.export_blocks([("w:9", None)], path)


def test_a_writer_whose_process_has_ended_is_found():
    unit = StorageUnit("node", True)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    lease = unit.lease("w", (process.pid, start_of_process(process.pid)), 1000)
    mine = unit.lease("mine", ME, 1000)
    assert lease is not None and mine is not None
    # A number that means another process here, or none: the client is in a container of its own.
    assert unit.lease("v", (process.pid, ME[1]), 1000) is unit.lease("v", (2**22, ME[1]), 1000) is None
    assert unit.check() == []
    process.kill()
    # A process that nobody has waited for counts as ended, too.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert unit.check() == ["w"]
    process.wait(10)
    assert unit.check() == ["w"]
    unit.abandon("w", [])
    assert unit.check() == []
    assert unit.stats()["free_bytes"] == lease.nbytes
    unit.seal("mine", mine.serial, [])
    assert unit.stats()["free_bytes"] == lease.nbytes + mine.nbytes


def test_without_shared_memory_nothing_is_lent():
    assert StorageUnit("node", False).lease("w", ME, 1000) is None
    limited = StorageUnit("node", True, limit=1000)
    assert limited.lease("w", ME, 1001) is None
    block = write(limited, "w:0", batch([1, 2]))
    assert block[1] is None
    assert limited.stats()["private_blocks"] == 1
    assert limited.read([block], cells(["scalar"], [0], [1])) is not None


def test_backends_are_found_by_name_and_can_be_added():
    register_storage_backend("Mine", LocalStorageHost, LocalStorageClient)
    assert storage_backend("Mine")[0] is LocalStorageHost
    with pytest.raises(ConfigError, match="SimpleStorage, Local"):
        storage_backend("Nope")
