"""How a reader gets rows of several lengths."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import rlflow.transfer_queue as tq

pytestmark = pytest.mark.usefixtures("table")
KEYS = ["a", "b", "c"]


@pytest.fixture
def rows(partition: str) -> str:
    """Rows of 2, 0 and 3 tokens."""
    lengths = [2, 0, 3]
    positions = torch.nested.nested_tensor_from_jagged(
        torch.arange(10).view(2, 5), torch.tensor([0, 2, 2, 5]), jagged_dim=2
    )
    data = TensorDict(
        {
            "ids": torch.nested.as_nested_tensor([torch.arange(1, n + 1) for n in lengths], layout=torch.jagged),
            "position_ids": positions,
            "score": torch.tensor([1.0, 2.0, 3.0]),
            "text": NonTensorStack("x", "y", "z"),
        },
        batch_size=[3],
    )
    tq.kv_batch_put(KEYS, partition, data)
    return partition


def test_padded_on_either_side(rows):
    got = tq.kv_batch_get(KEYS, rows, layout="padded", padding_value={"ids": -1})
    assert got["ids"].tolist() == [[1, 2, -1], [-1, -1, -1], [1, 2, 3]]
    assert got["position_ids"].tolist() == [[[0, 1, 0], [5, 6, 0]], [[0] * 3] * 2, [[2, 3, 4], [7, 8, 9]]]
    assert got["score"].tolist() == [1.0, 2.0, 3.0]
    assert got.get("text").tolist() == ["x", "y", "z"]
    got = tq.kv_batch_get(KEYS, rows, ["ids", "position_ids"], layout="padded", padding_side="left", padding_value=9)
    assert got["ids"].tolist() == [[9, 1, 2], [9, 9, 9], [1, 2, 3]]
    assert got["position_ids"].tolist() == [[[9, 0, 1], [9, 5, 6]], [[9] * 3] * 2, [[2, 3, 4], [7, 8, 9]]]


def test_as_a_list(rows):
    meta = tq.KVBatchMeta(KEYS, [{}] * 3, rows)
    for got in (
        tq.kv_batch_get_by_meta(meta, layout="list"),
        asyncio.run(tq.async_kv_batch_get_by_meta(meta, layout="list")),
        asyncio.run(tq.async_kv_batch_get(KEYS, rows, layout="list")),
    ):
        assert [row.tolist() for row in got.get("ids").tolist()] == [[1, 2], [], [1, 2, 3]]
        assert [tuple(row.shape) for row in got.get("position_ids").tolist()] == [(2, 2), (2, 0), (2, 3)]
        assert got.get("text").tolist() == ["x", "y", "z"]


def test_rows_that_are_ragged_in_the_last_dimension_keep_it(rows):
    assert tq.kv_batch_get(KEYS, rows)["position_ids"]._ragged_idx == 2
    one = tq.kv_batch_get(["c"], rows)["position_ids"]  # its lengths agree, and still the field is known
    assert one._ragged_idx == 2
    assert [tuple(row.shape) for row in one.unbind()] == [(2, 3)]


def test_unknown_layouts_are_refused(rows):
    with pytest.raises(ValueError, match="layout='square'.*jagged, padded or list"):
        tq.kv_batch_get(KEYS, rows, layout="square")
    with pytest.raises(ValueError, match="padding_side='top'"):
        tq.kv_batch_get(KEYS, rows, layout="padded", padding_side="top")


def test_all_fields_can_be_written_to_and_computed_with(rows):
    got = tq.kv_batch_get(KEYS, rows)
    (got["ids"] * 2 + got["ids"]).values().sum()
    got["ids"].values().zero_()
    got["score"].add_(1)
    got["position_ids"].values().fill_(3)
    again = tq.kv_batch_get(KEYS, rows)
    assert again["ids"].values().tolist() == [1, 2, 1, 2, 3]
    assert again["score"].tolist() == [1.0, 2.0, 3.0]
