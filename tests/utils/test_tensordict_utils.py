"""Batches keep their rows together, whatever is done to them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError

lengths = st.lists(st.integers(0, 5), min_size=1, max_size=8)


def make_batch(row_lengths, seed=0):
    """Every kind of value; each row's values say which row it is."""
    generator = torch.Generator().manual_seed(seed)
    rows = range(len(row_lengths))
    return tu.get_tensordict(
        {
            "dense": torch.rand(len(row_lengths), 3, generator=generator),
            "flat": tu.nested_from_list([torch.full((n,), i) for i, n in zip(rows, row_lengths, strict=True)]),
            "wide": tu.nested_from_list(
                [torch.full((n, 2), i) for i, n in zip(rows, row_lengths, strict=True)], ragged=1
            ),
            "last": tu.nested_from_list([torch.full((4, n), i) for i, n in zip(rows, row_lengths, strict=True)]),
            "object": [{"row": i} if i % 2 else [i] for i in rows],
        },
        {"option": [1, 2], "text": "x"},
    )


@given(lengths)
@settings(max_examples=40, deadline=None)
def test_chunks_joined_again_are_the_batch(row_lengths):
    batch = make_batch(row_lengths)
    parts = tu.chunk_tensordict(batch, len(row_lengths))
    assert [part.batch_size[0] for part in parts] == [1] * len(row_lengths)
    tu.assert_tensordict_eq(tu.concat_tensordict(parts), batch)
    tu.assert_tensordict_eq(tu.concat_tensordict([pickle.loads(pickle.dumps(part)) for part in parts]), batch)


@given(lengths, st.data())
@settings(max_examples=40, deadline=None)
def test_selected_rows_are_those_rows_of_every_value(row_lengths, data):
    n = len(row_lengths)
    index = data.draw(st.lists(st.integers(-n, n - 1), max_size=10))
    batch = make_batch(row_lengths)
    picked = tu.index_select_tensor_dict(batch, index)
    assert picked.batch_size[0] == len(index)
    assert torch.equal(picked["dense"], batch["dense"][index])
    assert tu.get(picked, "object") == [tu.get(batch, "object")[i] for i in index]
    assert tu.get(picked, "option") == [1, 2]
    for name in ("flat", "wide", "last"):
        rows, source = picked[name].unbind(), batch[name].unbind()
        assert all(torch.equal(row, source[i]) for row, i in zip(rows, index, strict=True))
        assert tu.ragged_dim(picked[name]) == tu.ragged_dim(batch[name])


@given(lengths, st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_padding_and_its_inverse(row_lengths, extra):
    values = torch.arange(sum(row_lengths)).float()
    jagged = tu.nested_from_values(values, row_lengths)
    width = max(row_lengths) + extra
    dense = tu.nested_to_padded(jagged, pad=-1.0, width=width)
    assert dense.shape == (len(row_lengths), width)
    assert torch.equal(dense != -1, tu.length_mask(torch.tensor(row_lengths), width))
    back = tu.padded_to_nested(dense, row_lengths)
    assert torch.equal(tu.nested_values(back), values)
    assert tu.nested_lengths(back).tolist() == row_lengths


def test_rows_that_are_ragged_in_the_last_dimension_keep_it_everywhere():
    rows = [torch.arange(4 * n).reshape(4, n) for n in (3, 1, 2)]
    jagged = tu.nested_from_list(rows)
    batch = tu.get_tensordict({"position_ids": jagged})
    batch = pickle.loads(pickle.dumps(batch))
    batch = tu.concat_tensordict(tu.chunk_tensordict(tu.index_select_tensor_dict(batch, [2, 0, 1]), 3))
    assert [torch.equal(a, rows[i]) for a, i in zip(batch["position_ids"].unbind(), (2, 0, 1), strict=True)] == [
        True
    ] * 3
    assert tu.nested_to_padded(jagged).shape == (3, 4, 3)
    assert torch.equal(tu.nested_to_padded(jagged)[1, :, :1], rows[1])


def test_a_mask_selects_rows():
    batch = make_batch([1, 2, 3])
    picked = tu.index_select_tensor_dict(batch, torch.tensor([True, False, True]))
    assert tu.get(picked, "object") == [[0], [2]]
    with pytest.raises(ContractError, match="mask"):
        tu.index_select_tensor_dict(batch, [True, False])
    with pytest.raises(ContractError, match="outside"):
        tu.index_select_tensor_dict(batch, [3])


def test_gradients_pass_through_jagged_values():
    values = torch.arange(6.0, requires_grad=True)
    jagged = tu.nested_from_values(values, [2, 4])
    doubled = tu.nested_like(values * 2, jagged)
    tu.nested_to_padded(jagged + doubled).sum().backward()
    assert values.grad.tolist() == [3.0] * 6


def test_sent_parts_carry_their_own_rows_only():
    batch = tu.get_tensordict(
        {"x": torch.zeros(1000, 100), "j": tu.nested_from_values(torch.zeros(50000), [50] * 1000)}
    )
    part = tu.contiguous(tu.chunk_tensordict(batch, 100)[3])
    assert len(pickle.dumps(part)) < len(pickle.dumps(batch)) / 20
    tu.assert_tensordict_eq(part, tu.slice_tensordict(batch, 30, 40))


@pytest.mark.parametrize("shuffle", [True, False])
def test_mini_batches_cover_each_row_once_an_epoch_in_an_order_fixed_by_the_seed(shuffle):
    batch = make_batch([1, 2, 3, 0, 1, 2])

    def order(seed):
        batches = tu.make_iterator(batch, 2, epochs=2, seed=seed, dataloader_kwargs={"shuffle": shuffle})
        return [batch_["dense"][:, 0].tolist() for batch_ in batches]

    first = order(7)
    assert len(first) == 6
    all_rows = sorted(batch["dense"][:, 0].tolist())
    assert sorted(sum(first[:3], [])) == sorted(sum(first[3:], [])) == all_rows
    assert order(7) == first
    assert (first[:3] != first[3:]) == shuffle
    assert (order(8) != first) == shuffle


def test_a_mini_batch_size_that_does_not_divide_is_refused():
    batch = make_batch([1, 2, 3])
    with pytest.raises(ContractError, match="does not divide"):
        tu.make_iterator(batch, 2, epochs=1)
    with pytest.raises(ContractError, match="num_workers"):
        tu.make_iterator(batch, 1, epochs=1, dataloader_kwargs={"num_workers": 2})
    with pytest.raises(ContractError, match="equal parts"):
        tu.chunk_tensordict(batch, 2)


def test_rows_of_dicts_become_a_batch_over_the_union_of_their_keys():
    rows = [{"ids": torch.arange(i + 1), "same": torch.ones(2), "name": str(i), "maybe": None} for i in range(3)]
    rows[2]["maybe"] = torch.ones(1)
    batch = tu.list_of_dict_to_tensordict(rows)
    assert batch["ids"].is_nested
    assert batch["same"].shape == (3, 2)
    assert tu.get(batch, "name") == ["0", "1", "2"]
    assert tu.get(batch, "maybe")[:2] == [None, None]
    with pytest.raises(ContractError, match=r"row 0 lacks \['late'\]"):
        tu.list_of_dict_to_tensordict([{"a": 1}, {"a": 2, "late": 3}])


def test_values_of_every_kind_come_out_as_they_went_in():
    batch = make_batch([1, 2])
    assert tu.get(batch, "option") == [1, 2]
    assert tu.get(batch, "object") == [[0], {"row": 1}]
    assert tu.get(batch, "absent", 5) == 5
    assert tu.get_non_tensor_data(batch, "text", None) == "x"
    assert tu.non_tensor_dict(batch) == {"option": [1, 2], "text": "x"}
    assert tu.pop(batch, "text") == "x"
    assert "text" not in batch.keys()
    assert set(tu.pop_keys(batch, ["flat", "object"]).keys()) == {"flat", "object"}
    assert set(batch.keys()) == {"dense", "wide", "last", "option"}
    with pytest.raises(KeyError, match="absent"):
        tu.get_keys(batch, ["absent"])
    tu.assign_non_tensor(batch, per_row=["a", "b"], whole="c")
    assert (tu.get(batch, "per_row"), tu.get(batch, "whole")) == (["a", "b"], "c")
    with pytest.raises(ContractError, match="3 values"):
        tu.assign_non_tensor(batch, per_row=[1, 2, 3])


@pytest.mark.parametrize(
    ("values", "whole", "message"),
    [
        ({"a": torch.ones(2), "b": torch.ones(3)}, {}, "one length"),
        ({"a": torch.ones(2)}, {"a": 1}, "one meaning"),
        ({"a": torch.tensor(1.0)}, {}, "scalar"),
        ({"a": [torch.ones(1), torch.ones(2)]}, {}, "list of tensors"),
        ({"a": 3}, {}, "a is a int"),
        ({"a": torch.nested.nested_tensor([torch.ones(1)])}, {}, "layout"),
    ],
)
def test_values_that_are_no_rows_are_refused(values, whole, message):
    with pytest.raises(ContractError, match=message):
        tu.get_tensordict(values, whole)


def test_arrays_are_taken_by_their_type():
    batch = tu.get_tensordict(
        {"number": np.arange(2), "word": np.array(["a", "b"]), "any": np.array([{}, 1], dtype=object)}
    )
    assert batch["number"].tolist() == [0, 1]
    assert tu.get(batch, "word") == ["a", "b"]
    assert tu.get(batch, "any") == [{}, 1]
    assert tu.get_tensordict({}, {"metrics": 1}).batch_size == torch.Size([])


def test_joining_refuses_what_would_lose_or_mix_values():
    with pytest.raises(ContractError, match=r"differ in \['b'\]"):
        tu.concat_tensordict([tu.get_tensordict({"a": torch.ones(1)}), tu.get_tensordict({"a": [1], "b": [1]})])
    with pytest.raises(ContractError, match="dense and object per row"):
        tu.concat_tensordict([tu.get_tensordict({"a": torch.ones(1)}), tu.get_tensordict({"a": [1]})])
    with pytest.raises(ContractError, match="shapes"):
        tu.concat_tensordict([tu.get_tensordict({"a": torch.ones(1, 2)}), tu.get_tensordict({"a": torch.ones(1, 3)})])
    metrics = [tu.get_tensordict({}, {"metrics": i}) for i in range(2)]
    assert tu.get(tu.concat_tensordict(metrics), "metrics") == 0
    with pytest.raises(ContractError, match="with rows and batches without"):
        tu.concat_tensordict([metrics[0], tu.get_tensordict({"a": [1]})])


def test_union_needs_equal_values_under_equal_names():
    first = tu.get_tensordict({"a": torch.tensor([1.0, float("nan")])})
    tu.union_tensor_dict(first, tu.get_tensordict({"a": torch.tensor([1.0, float("nan")]), "b": [1, 2]}))
    assert tu.get(first, "b") == [1, 2]
    with pytest.raises(ContractError, match="a is in both"):
        tu.union_tensor_dict(first, tu.get_tensordict({"a": torch.zeros(2)}))


def test_rows_are_padded_from_the_start_and_taken_off_again():
    batch = make_batch([1, 2, 3])
    padded, pad = tu.pad_to_divisor(batch, 4)
    assert (padded.batch_size[0], pad) == (4, 1)
    assert tu.get(padded, "object")[3] == [0]
    tu.assert_tensordict_eq(tu.unpad(padded, pad), batch)


def test_a_jagged_tensor_says_what_does_not_fit():
    with pytest.raises(ContractError, match="add up to 3"):
        tu.nested_from_values(torch.ones(4), [1, 2])
    with pytest.raises(ContractError, match="longest has 3"):
        tu.nested_to_padded(tu.nested_from_values(torch.ones(4), [1, 3]), width=2)
    with pytest.raises(ContractError, match="ragged=1"):
        tu.nested_from_list([torch.ones(1, 2), torch.ones(2, 2)])
    with pytest.raises(ContractError, match="dense"):
        tu.nested_lengths(torch.ones(2))
    with pytest.raises(ContractError, match="do not fit"):
        tu.padded_to_nested(torch.ones(2, 3), [1, 4])


def test_views_with_gaps_are_read_right():
    jagged = tu.nested_from_values(torch.arange(6), [2, 4])
    gaps = torch.nested.narrow(
        torch.arange(10).reshape(2, 5), 1, torch.tensor([0, 2]), torch.tensor([2, 3]), torch.jagged
    )
    assert tu.nested_lengths(gaps).tolist() == [2, 3]
    assert tu.nested_values(gaps).tolist() == [0, 1, 7, 8, 9]
    assert tu.nested_to_padded(gaps).tolist() == [[0, 1, 0], [7, 8, 9]]
    assert tu.nested_values(tu.concat_nested_tensors([jagged, gaps])).tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 7, 8, 9]
