"""Laws of BatchMeta."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from rlflow.transfer_queue import BatchMeta, extract_field_schema


@st.composite
def batches(draw: st.DrawFn) -> BatchMeta:
    indexes = draw(st.lists(st.integers(0, 1000), unique=True, max_size=10))
    size = len(indexes)
    lengths = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    uniform = len(set(lengths)) == 1
    schema = {
        "ids": {
            "dtype": torch.int64,
            "shape": (lengths[0],) if uniform else None,
            "is_nested": True,
            "is_non_tensor": False,
            "per_sample_shapes": [(n,) for n in lengths],
        },
        "score": {"dtype": torch.float32, "shape": (1,), "is_nested": False, "is_non_tensor": False},
        "uid": {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True},
    }
    return BatchMeta(
        indexes,
        [draw(st.sampled_from(["train", "val"])) for _ in indexes],
        schema,
        [draw(st.integers(0, 1)) for _ in indexes],
        {"step": 3},
        [{"n": i} for i in range(size)],
        [{"ids": i} for i in range(size)],
    )


@given(batches(), st.integers(1, 12))
def test_concat_undoes_chunk(meta, parts):
    assert BatchMeta.concat(meta.chunk(parts)) == meta


@given(batches(), st.randoms())
def test_reorder_equals_select_samples(meta, random):
    order = list(range(meta.size))
    random.shuffle(order)
    selected = meta.select_samples(order)
    meta.reorder(order)
    assert meta == selected


@given(batches())
def test_rows_stay_together_in_slices_views_and_partitions(meta):
    shapes = dict(zip(meta.global_indexes, meta.get_shapes("ids"), strict=True))
    for part in meta.chunk_by_partition():
        assert len(set(part.partition_ids)) == 1
        assert dict(zip(part.global_indexes, part.get_shapes("ids"), strict=True)).items() <= shapes.items()
    for i, view in enumerate(meta.samples):
        one = meta[i]
        assert view.global_index == one.global_indexes[0]
        assert view.fields["ids"]["shape"] == one.get_shapes("ids")[0]
        assert view.custom_meta == one.custom_meta[0]
    assert meta[1:3] == meta.select_samples(range(meta.size)[1:3])


@given(batches())
def test_pickle_keeps_everything_and_status_stays_writable(meta):
    meta.production_status.setflags(write=False)  # as after a zero-copy load
    loaded = pickle.loads(pickle.dumps(meta))
    assert loaded == meta
    loaded.production_status[:] = 1
    assert loaded.is_ready == (loaded.size > 0)


def test_union_takes_the_other_fields_and_needs_both_ready():
    left = BatchMeta([1, 2], ["t", "t"], {"a": _scalar(torch.int64), "b": _scalar(torch.int64)}, [1, 1], {"x": 1})
    right = BatchMeta([1, 2], ["t", "t"], {"b": _scalar(torch.float32)}, [1, 0], {"x": 2}, [{"k": 1}, {}])
    both = left.union(right)
    assert both.field_names == ["a", "b"]
    assert both.get_dtypes("b") == [torch.float32, torch.float32]
    assert both.production_status.tolist() == [1, 0]
    assert both.extra_info == {"x": 2}
    assert both.custom_meta == [{"k": 1}, {}]
    with pytest.raises(ValueError, match="same rows"):
        left.union(right[0])


def test_select_fields_ignores_unknown_names():
    meta = BatchMeta([1], ["t"], {"a": _scalar(torch.int64)}, [1])
    assert meta.select_fields(["a", "nope"]).field_names == ["a"]
    assert meta.select_fields(["nope"]).field_names == []


def test_add_fields_describes_each_kind_of_value():
    data = TensorDict(
        {
            "dense": torch.zeros(2, 3),
            "scalar": torch.zeros(2),
            "jagged": torch.nested.as_nested_tensor([torch.zeros(1), torch.zeros(4)], layout=torch.jagged),
            "text": NonTensorStack("a", "b"),
        },
        batch_size=[2],
    )
    meta = BatchMeta([7, 8], ["t", "t"]).add_fields(data)
    assert meta.is_ready
    assert meta.get_shapes("dense") == [(3,), (3,)]
    assert meta.get_shapes("scalar") == [(1,), (1,)]
    assert meta.get_shapes("jagged") == [(1,), (4,)]
    assert meta.get_shapes("text") == [None, None]
    assert meta.field_schema["text"]["is_non_tensor"]
    assert not BatchMeta([7, 8], ["t", "t"]).add_fields(data, set_all_ready=False).is_ready
    with pytest.raises(ValueError, match="2 rows"):
        BatchMeta([7], ["t"]).add_fields(data)
    with pytest.raises(ValueError, match="batch dimension"):
        extract_field_schema(TensorDict({}, batch_size=[]))


def test_concat_refuses_other_fields_dtypes_and_entries():
    one = BatchMeta([1], ["t"], {"a": _scalar(torch.int64)}, extra_info={"x": 1})
    for other in (
        BatchMeta([2], ["t"], {"b": _scalar(torch.int64)}),
        BatchMeta([2], ["t"], {"a": _scalar(torch.float32)}),
        BatchMeta([2], ["t"], {"a": _scalar(torch.int64)}, extra_info={"x": 2}),
    ):
        with pytest.raises(ValueError, match=r"cannot join|differs"):
            BatchMeta.concat([one, other])


def test_extra_info_and_tags():
    meta = BatchMeta([1, 2], ["t", "t"])
    meta.set_extra_info("a", [1])
    meta.update_extra_info({"b": 2})
    copied = meta.get_all_extra_info()
    copied["a"].append(2)
    assert meta.get_extra_info("a") == [1]
    assert meta.has_extra_info("b")
    assert meta.remove_extra_info("b") == 2
    assert meta.get_extra_info("b", "gone") == "gone"
    meta.clear_extra_info()
    assert not meta.extra_info
    meta.update_custom_meta([{"s": 1}, {}])
    meta.update_custom_meta([{"t": 2}, {"t": 3}])
    assert meta.get_all_custom_meta() == [{"s": 1, "t": 2}, {"t": 3}]
    meta.clear_custom_meta()
    assert meta.custom_meta == [{}, {}]
    with pytest.raises(ValueError, match="1 tags for 2 rows"):
        meta.update_custom_meta([{}])


def test_empty_and_wrong_lengths():
    assert BatchMeta().size == 0
    assert not BatchMeta.empty({"x": 1}).is_ready
    assert BatchMeta.empty({"x": 1}).extra_info == {"x": 1}
    with pytest.raises(ValueError, match="partition_ids"):
        BatchMeta([1, 2], ["t"])
    with pytest.raises(ValueError, match="production_status"):
        BatchMeta([1], ["t"], production_status=np.zeros(2))


def _scalar(dtype: torch.dtype) -> dict:
    return {"dtype": dtype, "shape": (1,), "is_nested": False, "is_non_tensor": False}


@st.composite
def columns(draw: st.DrawFn) -> TensorDict:
    size = draw(st.integers(1, 4))
    shapes = st.lists(st.integers(0, 3), max_size=2)
    fields: dict = {}
    for name in draw(st.lists(st.sampled_from(["a", "b", "c"]), unique=True, min_size=1)):
        kind = draw(st.sampled_from(["dense", "jagged", "objects"]))
        if kind == "dense":
            fields[name] = torch.zeros(size, *draw(shapes), dtype=draw(st.sampled_from([torch.int64, torch.bool])))
        elif kind == "jagged":
            rows = [torch.zeros(draw(st.integers(0, 4)), 2) for _ in range(size)]
            fields[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        else:
            fields[name] = NonTensorStack(*[str(i) for i in range(size)])
    return TensorDict(fields, batch_size=[size])


@given(columns())
def test_the_schema_of_data_says_the_shape_of_every_row(data):
    schema = extract_field_schema(data)
    meta = BatchMeta(range(len(data)), ["t"] * len(data), schema)
    assert set(schema) == set(data.keys())
    for name in schema:
        value = data.get(name)
        if not isinstance(value, torch.Tensor):
            assert meta.get_shapes(name) == [None] * len(data)
            assert meta.get_dtypes(name) == [None] * len(data)
            continue
        assert meta.get_dtypes(name) == [value.dtype] * len(data)
        assert meta.get_shapes(name) == [tuple(row.shape) or (1,) for row in value.unbind()]


@given(columns(), st.data())
def test_schemas_of_parts_join_to_the_schema_of_the_whole(data, draw):
    meta = BatchMeta(range(len(data)), ["t"] * len(data)).add_fields(data)
    cut = draw.draw(st.integers(0, len(data)))
    joined = BatchMeta.concat([meta[:cut], meta[cut:]])
    assert [joined.get_shapes(name) for name in joined.field_names] == [meta.get_shapes(n) for n in meta.field_names]
    assert joined.is_ready


@given(batches(), batches())
def test_union_laws(meta, other):
    assert meta.union(meta) == meta
    other = BatchMeta(
        meta.global_indexes, meta.partition_ids, {"extra": _scalar(torch.bool)}, extra_info=other.extra_info
    )
    both = meta.union(other)
    assert both.field_names == sorted({*meta.field_names, "extra"})
    assert both.select_fields(meta.field_names).field_schema == meta.field_schema
    assert not both.production_status.any()


@given(batches(), st.data())
def test_selecting_twice_is_selecting_once(meta, draw):
    first = draw.draw(st.lists(st.integers(0, max(meta.size - 1, 0)), max_size=6)) if meta.size else []
    second = draw.draw(st.lists(st.integers(0, max(len(first) - 1, 0)), max_size=6)) if first else []
    assert meta.select_samples(first).select_samples(second) == meta.select_samples([first[i] for i in second])
