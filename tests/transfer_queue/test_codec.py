"""What goes in comes out: bytes, types, layouts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlflow.transfer_queue.block import BlockView, Draft, gather, runs_of
from rlflow.transfer_queue.codec import (
    apply_parser,
    decode_batch,
    decode_column,
    decode_rows,
    encode_batch,
    encode_column,
    encode_row,
)
from rlflow.transfer_queue.column import Column
from rlflow.transfer_queue.errors import QueueArgumentError, QueueTypeError
from rlflow.transfer_queue.objects import pack, unpack


def stored(columns: list[Column], which: np.ndarray | None = None, places: np.ndarray | None = None) -> Column:
    """Rows of columns that were written as one block each; without numbers row 0 of each."""
    blocks = [BlockView(Draft({"x": column}).to_array()) for column in columns]
    which = np.arange(len(columns)) if which is None else which
    return gather(blocks, "x", runs_of(which, np.zeros(len(which), np.int64) if places is None else places))


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None), max_size=5)
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(plain)
def test_plain_objects_survive_with_their_types(value):
    back = unpack(pack(value))
    assert back == value
    assert repr(back) == repr(value)


def test_hostile_text_and_special_numbers_survive():
    for value in ["\ud800", "a\x00b", "{" * 100_000, 10**400, -(10**30), math.inf, [], {}, {"": ()}]:
        assert unpack(pack(value)) == value
    assert math.isnan(unpack(pack(float("nan"))))


@pytest.mark.parametrize(
    "array",
    [np.arange(6).reshape(2, 3), np.zeros((0, 4), np.float32), np.array(["a", "bc"]), np.array(2.5), np.ones(2, bool)],
)
def test_arrays_inside_objects_survive_and_are_writable(array):
    back = unpack(pack({"x": [array]}))["x"][0]
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable


def test_numpy_scalars_and_tensors_inside_objects_keep_their_types():
    value = {"f": np.float64(1.5), "i": np.int32(3), "s": np.str_("x"), "t": torch.ones(2, 3, dtype=torch.bfloat16)}
    back = unpack(pack(value))
    assert [type(back[key]) for key in "fis"] == [np.float64, np.int32, np.str_]
    assert torch.equal(back["t"], value["t"])
    assert back["t"].dtype == torch.bfloat16


@pytest.mark.parametrize("value", [{1, 2}, object(), print, 1j, np.array([{}], dtype=object), [[{"deep": {1}}]]])
def test_other_objects_are_refused_with_the_name_of_the_field(value):
    with pytest.raises(QueueTypeError, match=r"field 'extra', row 1: .*cannot be stored"):
        encode_column("extra", ["fine", value], 2)


def test_too_deep_nesting_is_refused_with_the_name_of_the_field():
    value: list = []
    for _ in range(2000):
        value = [value]
    with pytest.raises(QueueTypeError, match="field 'extra'"):
        encode_column("extra", [value], 1)


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.sampled_from([(), (3,), (2, 2), (0,)]),
)
def test_ragged_rows_of_any_dtype_round_trip_as_jagged(dtype, lengths, inner):
    rows = [torch.randint(0, 2, (n, *inner)).to(dtype) for n in lengths]
    columns = [encode_row({"x": row})["x"] for row in rows]
    column = stored(columns)
    back = decode_column(column, {})
    assert back.layout == torch.jagged
    assert back.dtype == dtype
    assert back.offsets().diff().tolist() == lengths
    for got, row in zip(back.unbind(), rows, strict=True):
        assert torch.equal(got, row)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.booleans())
def test_rows_ragged_in_the_last_dimension_round_trip(lengths, as_nested):
    rows = [torch.randn(4, n) for n in lengths]
    if as_nested:
        values = torch.cat(rows, dim=1)
        offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
        data = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)
        column = encode_column("position_ids", data, len(rows))
    else:
        columns = [encode_row({"x": row})["x"] for row in rows]
        column = stored(columns)
        column.ragged = 1  # what the table knows once two rows have differed
    back = decode_column(column, {})
    assert back._ragged_idx == 2
    for got, row in zip(back.unbind(), rows, strict=True):
        assert torch.equal(got, row)


def test_rows_that_fit_no_layout_come_back_one_by_one():
    columns = [
        encode_row({"x": row})["x"] for row in (torch.ones(2, 3), torch.ones(3, 2), torch.ones(4), torch.tensor(1.0))
    ]
    column = stored(columns)
    back = decode_column(column, {})
    assert isinstance(back, NonTensorStack)
    assert [tuple(row.shape) for row in back.tolist()] == [(2, 3), (3, 2), (4,), ()]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # strided nested is the prototype
def test_each_kind_of_field_comes_back_in_its_layout():
    data = TensorDict(
        {
            "scalar": torch.arange(3),
            "equal": torch.arange(6.0).reshape(3, 2),
            "also": torch.arange(6).reshape(3, 2),
            "strided": torch.nested.nested_tensor([torch.ones(1), torch.ones(2), torch.ones(3)]),
            "text": NonTensorStack("a", "b", "c"),
            "mixed": NonTensorStack([1], {"k": 2}, None),
            "same": NonTensorData("x", batch_size=[3]),
        },
        batch_size=[3],
    )
    back = decode_batch(encode_batch(data, 3), 3)
    assert back["scalar"].tolist() == [0, 1, 2]
    assert back["equal"].offsets().tolist() == [0, 2, 4, 6]
    assert back["strided"].offsets().tolist() == [0, 1, 3, 6]
    assert back.get("text").tolist() == ["a", "b", "c"]
    assert back.get("mixed").tolist() == [[1], {"k": 2}, None]
    assert back.get("same").tolist() == ["x", "x", "x"]
    # Fields of equal lengths can be combined: they share their offsets.
    assert (back["equal"] * back["also"]).values().tolist() == [0, 1, 4, 9, 16, 25]
    back["equal"].values().add_(1)  # the result owns its memory


def test_jagged_views_are_stored_without_what_they_hide():
    whole = torch.nested.as_nested_tensor([torch.arange(5), torch.arange(7)], layout=torch.jagged)
    data = TensorDict({"x": whole}, batch_size=[2])[1:]
    assert decode_batch(encode_batch(data, 1), 1)["x"].values().tolist() == list(range(7))
    padded = torch.arange(12).reshape(2, 6)
    narrowed = torch.nested.narrow(padded, 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged)
    back = decode_column(encode_column("x", narrowed, 2), {})
    assert [row.tolist() for row in back.unbind()] == [[0, 1], [7, 8, 9]]


def test_a_tensor_on_the_autograd_tape_is_stored_by_value():
    column = encode_column("x", torch.ones(2, 2, requires_grad=True) * 2, 2)
    assert decode_column(column, {}).values().tolist() == [2, 2, 2, 2]


def test_conjugated_and_negated_views_are_stored_by_value():
    values = torch.tensor([[1 + 2j, 3 - 4j]])
    for view in (values.conj(), values.conj().imag, torch._neg_view(values.real)):
        assert torch.equal(decode_column(encode_column("x", view, 1), {}).values(), view.reshape(-1))
        (inside,) = decode_rows(encode_column("x", [{"t": view}], 1))
        assert torch.equal(inside["t"], view)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.zeros(2, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    ],
    ids=["sparse", "meta", "quantized"],
)
def test_tensors_whose_bytes_are_not_their_values_are_refused(make):
    tensor = make()
    with pytest.raises(QueueTypeError, match="field 'x'"):
        encode_batch(TensorDict({"x": tensor}, batch_size=[2]), 2)
    with pytest.raises(QueueTypeError, match="field 'x'"):
        encode_row({"x": {"inside": tensor}})


@pytest.mark.parametrize("name", [1, ("a", "b"), "\ud800"])
def test_a_field_has_a_name_that_can_be_written(name):
    with pytest.raises(QueueTypeError, match="a field is named"):
        encode_row({"x": torch.ones(1), name: torch.ones(1)})


def test_wrong_sizes_and_kinds_are_refused():
    with pytest.raises(QueueArgumentError, match="3 keys"):
        encode_batch(TensorDict({"x": torch.zeros(2)}, batch_size=[2]), 3)
    with pytest.raises(QueueTypeError, match="TensorDict"):
        encode_batch({"x": torch.zeros(2)}, 2)
    with pytest.raises(QueueTypeError, match="field 'sub'"):
        encode_batch(TensorDict({"sub": TensorDict({"x": torch.zeros(2)}, [2])}, batch_size=[2]), 2)
    with pytest.raises(QueueArgumentError, match="nested tensor"):
        encode_row({"x": torch.nested.as_nested_tensor([torch.ones(1)], layout=torch.jagged)})


def test_a_parser_must_keep_fields_and_rows():
    columns = {"x": encode_column("x", torch.ones(2, 3), 2), "y": encode_column("y", ["a", "b"], 2)}
    with pytest.raises(QueueArgumentError, match="keep the fields"):
        apply_parser(columns, lambda fields: {"x": fields["x"]})
    with pytest.raises(QueueArgumentError, match="1 rows of the 2 of field 'y'"):
        apply_parser(columns, lambda fields: {"x": fields["x"], "y": ["a"]})
    with pytest.raises(QueueArgumentError, match="NoneType"):
        apply_parser(columns, lambda fields: None)
    with pytest.raises(QueueArgumentError, match="several dtypes of field 'x'"):
        apply_parser(columns, lambda fields: {**fields, "x": [torch.ones(3), torch.ones(3, dtype=torch.int64)]})
    other_ranks = apply_parser(columns, lambda fields: {**fields, "x": [torch.ones(2), torch.zeros(2, 2)]})
    assert [row.tolist() for row in decode_rows(other_ranks["x"])] == [[1, 1], [[0, 0], [0, 0]]]
