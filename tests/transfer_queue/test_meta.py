"""Laws of KVBatchMeta."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.transfer_queue import KVBatchMeta

tags = st.dictionaries(st.sampled_from(["status", "seq_len", "step"]), st.one_of(st.integers(), st.text(max_size=3)))


@st.composite
def metas(draw: st.DrawFn) -> KVBatchMeta:
    keys = draw(st.lists(st.text(max_size=4), unique=True, max_size=12))
    return KVBatchMeta(
        keys=keys,
        tags=[draw(tags) for _ in keys],
        partition_id=draw(st.sampled_from(["train", "val"])),
        fields=draw(st.one_of(st.none(), st.lists(st.sampled_from("abc"), unique=True))),
        extra_info=draw(st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)),
    )


@given(metas(), st.integers(1, 15))
def test_concat_undoes_chunk(meta, parts):
    assert KVBatchMeta.concat(meta.chunk(parts)) == meta


@given(metas(), st.integers(1, 15))
def test_chunks_are_near_equal_and_longer_ones_come_first(meta, parts):
    sizes = [part.size for part in meta.chunk(parts)]
    assert len(sizes) == parts
    assert sum(sizes) == len(meta)
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(metas(), st.randoms())
def test_reorder_keeps_keys_and_tags_together_and_its_inverse_restores(meta, random):
    order = list(range(meta.size))
    random.shuffle(order)
    moved = pickle.loads(pickle.dumps(meta))
    moved.reorder(order)
    assert moved.keys == [meta.keys[i] for i in order]
    assert dict(zip(moved.keys, map(str, moved.tags), strict=True)) == dict(
        zip(meta.keys, map(str, meta.tags), strict=True)
    )
    moved.reorder([order.index(i) for i in range(meta.size)])
    assert moved == meta


@given(metas(), st.randoms())
def test_select_keys_equals_reorder_for_a_permutation(meta, random):
    order = list(range(meta.size))
    random.shuffle(order)
    selected = meta.select_keys([meta.keys[i] for i in order])
    moved = pickle.loads(pickle.dumps(meta))
    moved.reorder(order)
    assert selected == moved


def test_parts_share_nothing_with_their_source():
    meta = KVBatchMeta(keys=["a"], tags=[{"n": {"deep": [1]}}], partition_id="train", extra_info={"x": [1]})
    part = meta.chunk(1)[0]
    part.tags[0]["n"]["deep"].append(2)
    part.extra_info["x"].append(2)
    assert meta.tags == [{"n": {"deep": [1]}}]
    assert meta.extra_info == {"x": [1]}


def test_construction_checks():
    with pytest.raises(ValueError, match="2 keys but 1 tags"):
        KVBatchMeta(keys=["a", "b"], tags=[{}])
    with pytest.raises(ValueError, match="duplicate keys"):
        KVBatchMeta(keys=["a", "a"], tags=[{}, {}])
    with pytest.raises(ValueError, match="duplicate fields"):
        KVBatchMeta(fields=["x", "x"])


def test_select_and_reorder_checks():
    meta = KVBatchMeta(keys=["a", "b"], tags=[{}, {}])
    with pytest.raises(RuntimeError, match="'c'"):
        meta.select_keys(["c"])
    with pytest.raises(ValueError, match="duplicate"):
        meta.select_keys(["a", "a"])
    for wrong in ([0], [0, 0], [0, 2]):
        with pytest.raises(ValueError, match="reorder"):
            meta.reorder(wrong)


def test_concat_merges_equal_extra_info_by_content():
    first = KVBatchMeta(["a"], [{}], "train", extra_info={"t": torch.ones(2), "n": np.arange(2), "only": 1})
    second = KVBatchMeta(["b"], [{}], "train", extra_info={"t": torch.ones(2), "n": np.arange(2)})
    assert KVBatchMeta.concat([first, second]).extra_info.keys() == {"t", "n", "only"}


@pytest.mark.parametrize(
    "other",
    [
        KVBatchMeta(["b"], [{}], "val", ["x"]),
        KVBatchMeta(["b"], [{}], "train", ["y"]),
        KVBatchMeta(["b"], [{}], "train", None),
        KVBatchMeta(["a"], [{}], "train", ["x"]),
        KVBatchMeta(["b"], [{}], "train", ["x"], {"k": 2}),
        KVBatchMeta(["b"], [{}], "train", ["x"], {"k": torch.tensor([1])}),
    ],
    ids=["partition", "fields", "unknown fields", "same key", "extra_info", "extra_info type"],
)
def test_concat_refuses_parts_that_contradict(other):
    with pytest.raises(ValueError, match=r"."):
        KVBatchMeta.concat([KVBatchMeta(["a"], [{}], "train", ["x"], {"k": 1}), other])


def test_concat_without_extra_info_gives_an_empty_dict_that_can_be_updated():
    joined = KVBatchMeta.concat([KVBatchMeta(["a"], [{}], extra_info=None), KVBatchMeta(["b"], [{}])])
    joined.extra_info.update(x=1)
    assert KVBatchMeta.concat([]).extra_info == {}
