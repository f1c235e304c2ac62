"""The bookkeeping alone: versions, garbage, capacity."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.transfer_queue import changes as changes_module
from rlflow.transfer_queue.capacity import Bounds
from rlflow.transfer_queue.column import FieldHead
from rlflow.transfer_queue.errors import CapacityError, DtypeConflictError, StorageKeyNotFoundError, WatchGapError
from rlflow.transfer_queue.table import BlockHead, Table


def block(name: str, shapes: list[tuple[int, ...]], unit: int = 0, dtype: str = "float32", **fields: str) -> BlockHead:
    head = FieldHead(dtype, np.array(shapes, np.int64).reshape(len(shapes), -1), None)
    return BlockHead(unit, name, {field: head for field in fields or {"x": ""}})


operations = st.lists(
    st.tuples(
        st.sampled_from(["put", "clear"]),
        st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3, unique=True),
        st.integers(0, 9),
    ),
    max_size=30,
)


@given(operations, st.lists(st.booleans(), min_size=30, max_size=30))
def test_a_watcher_that_applies_the_changes_holds_the_listing(steps, looks):
    table = Table()
    version, held = 0, {}
    for (kind, keys, value), look in zip(steps, looks, strict=False):
        if kind == "put":
            table.put(keys, "p", [{"v": value}] * len(keys))
        else:
            table.clear(keys, "p")
        if look:
            version, changes = table.changes("p", version)
            for key, tag in changes.items():
                held.pop(key, None) if tag is None else held.__setitem__(key, tag)
            assert held == table.listing("p").get("p", {})


@given(operations)
def test_clearing_everything_frees_every_block(steps):
    table = Table()
    written, freed = set(), []
    for number, (kind, keys, _) in enumerate(steps):
        if kind == "put":
            table.put(keys, "p", None, block(f"b{number}", [(1,)] * len(keys), x="", y=""))
            written.add(f"b{number}")
        else:
            table.clear(keys, "p")
        freed += [block_id for ids in table.take_garbage().values() for block_id in ids]
    table.clear(list("abcdef"), "p")
    freed += [block_id for ids in table.take_garbage().values() for block_id in ids]
    assert sorted(freed) == sorted(written)
    assert table.listing() in ({}, {"p": {}})


def test_only_changes_of_keys_and_tags_count():
    table = Table()
    table.put(["a", "b"], "p", [{"s": 1}, {"s": 2}])
    version, changes = table.changes("p", 0)
    assert changes == {"a": {"s": 1}, "b": {"s": 2}}
    table.put(["a"], "p", None, block("b1", [(1,)]))
    assert table.changes("p", version) == (version, {})
    table.put(["c"], "p", None, block("b2", [(1,)]))
    version, changes = table.changes("p", version)
    assert changes == {"c": {}}
    table.put(["a"], "other", [{"s": 3}])
    assert table.changes("p", version) == (version, {})
    table.clear(["a"], "p")
    assert table.changes("p", version)[1] == {"a": None}


def test_a_watcher_that_is_too_far_behind_is_told_so(monkeypatch):
    monkeypatch.setattr(changes_module, "MAX_TOMBSTONES", 2)
    table = Table()
    table.put(list("abcd"), "p", [{}] * 4)
    version, _ = table.changes("p", 0)
    for key in "abc":
        table.clear([key], "p")
    with pytest.raises(WatchGapError, match="from version 0"):
        table.changes("p", version)
    assert table.changes("p", version + 1)[1] == {"b": None, "c": None}
    assert table.changes("p", 0)[1] == {"d": {}}
    with pytest.raises(WatchGapError):
        table.changes("p", 99)


def test_a_refused_put_changes_nothing():
    table = Table(Bounds(rows=2))
    table.put(["a"], "p", [{"s": 1}], block("b1", [(2,)]))
    before = table.changes("p", 0)
    with pytest.raises(DtypeConflictError, match=r"field 'x' of partition 'p' holds float32, the put offers int64"):
        table.put(["a", "new"], "p", [{"s": 2}, {}], block("b2", [(2,), (2,)], dtype="int64"))
    with pytest.raises(CapacityError, match="total_storage_size"):
        table.put(["b", "c"], "p", None, block("b3", [(2,), (2,)]))
    assert table.changes("p", 0) == before
    assert table.take_garbage() == {}


def test_a_field_may_change_its_dtype_once_no_row_has_it():
    table = Table()
    table.put(["a"], "p", None, block("b1", [(2,)]))
    table.clear(["a"], "p")
    table.put(["a"], "p", None, block("b2", [(2,)], dtype="int64"))


def test_the_ragged_dimension_is_learnt_from_all_rows_of_a_field():
    table = Table()
    table.put(["a"], "p", None, block("b1", [(4, 3)]))
    assert table.locate(["a"], "p", None, True).ragged == {"x": None}
    table.put(["b"], "p", None, block("b2", [(4, 5)]))
    assert table.locate(["a"], "p", None, True).ragged == {"x": 1}


def test_row_numbers_are_never_reused():
    table = Table()
    table.put(["a"], "p", [{}])
    first = table.indexes("p", ["a"])
    table.clear(["a"], "p")
    table.put(["a"], "p", [{}])
    assert table.indexes("p", ["a"]) != first
    with pytest.raises(StorageKeyNotFoundError, match="cleared"):
        table.keys_of(first)


def test_replies_are_snapshots():
    table = Table()
    reply = table.put(["a"], "p", [{"s": 1}])
    table.put(["a"], "p", [{"s": 2}])
    assert reply.merged([{"s": 1}]) == [{"s": 1}]
