from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.checkpoint_engine.chunks import merge_weight_chunks, split_weight_chunks
from rlflow.utils.errors import WeightSyncError

TYPES = [torch.bfloat16, torch.float32, torch.int64, torch.bool]


def tensors(sizes):
    generator = torch.Generator().manual_seed(0)
    return [
        (f"t{i}", torch.randint(0, 2, (size, 3), generator=generator).to(TYPES[i % len(TYPES)]))
        for i, size in enumerate(sizes)
    ]


@given(st.lists(st.integers(0, 40), max_size=12), st.sampled_from([64, 128, 192, 4096]))
def test_what_is_split_comes_together_again(sizes, bucket):
    named = tensors(sizes)
    chunks = list(split_weight_chunks(named, bucket))
    for meta, piece in chunks:
        assert piece.numel() == meta.chunk_size and meta.offset + meta.chunk_size <= bucket
    merged = list(merge_weight_chunks(chunks, bucket))
    assert [name for name, _ in merged] == [name for name, _ in named]
    for (_, got), (_, wanted) in zip(merged, named, strict=True):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)


def test_pieces_of_one_bucket_do_not_overlap():
    used, last = 0, 0
    for meta, _ in split_weight_chunks(tensors([5, 9, 30, 1]), 128):
        used = 0 if meta.offset == 0 else used
        assert meta.offset >= used
        used, last = meta.offset + meta.chunk_size, last + 1
    assert last >= 4


@pytest.mark.parametrize("broken", ["drop the first", "drop the last", "exchange"])
def test_missing_and_exchanged_pieces_are_named(broken):
    chunks = list(split_weight_chunks([("big", torch.arange(64))], 128))
    assert len(chunks) == 4
    wrong = {"drop the first": chunks[1:], "drop the last": chunks[:-1], "exchange": [chunks[0], *chunks[:0:-1]]}
    with pytest.raises(WeightSyncError, match="big") as caught:
        list(merge_weight_chunks(wrong[broken], 128))
    assert caught.value.tensors == ("big",)


def test_a_bucket_too_small_for_a_view_is_refused():
    with pytest.raises(ValueError, match="too small"):
        list(split_weight_chunks([("t", torch.zeros(3))], 32))
