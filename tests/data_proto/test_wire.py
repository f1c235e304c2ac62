"""What is sent or written arrives as it was, tensors as bytes, and a file never runs code."""

from __future__ import annotations

import pickle
import pickletools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.data_proto import DataProto, DataProtoError
from rlflow.utils import tensordict_utils as tu

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool, torch.complex64]
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=4,
)


@st.composite
def batches(draw):
    n = draw(st.integers(0, 5))
    tensors = {}
    for i, dtype in enumerate(draw(st.lists(st.sampled_from(DTYPES), max_size=3))):
        shape = (n, *draw(st.lists(st.integers(0, 3), max_size=2)))
        tensors[f"dense{i}"] = torch.randn(shape).mul(9).to(dtype)
    if n and draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
        tensors["jagged"] = tu.nested_from_list([torch.randn(length) for length in lengths])
        tensors["positions"] = tu.nested_from_list([torch.randn(3, length) for length in lengths])
    objects = draw(st.lists(plain, min_size=n, max_size=n))
    arrays = {
        "objects": objects,
        "numbers": np.arange(n),
        "names": np.array(["é"] * n),
        "grid": np.zeros((n, 2), object),
    }
    return DataProto.from_dict(tensors, arrays, draw(st.dictionaries(st.text(), plain, max_size=3)))


def assert_same(first, second):
    assert (first.batch is None) == (second.batch is None) and len(first) == len(second)
    if first.batch is not None:
        tu.assert_tensordict_eq(first.batch, second.batch)
    for mine, other in ((first.non_tensor_batch, second.non_tensor_batch), (first.meta_info, second.meta_info)):
        assert tu.values_equal(mine, other)
    for name, array in first.non_tensor_batch.items():
        assert array.dtype == second.non_tensor_batch[name].dtype


@settings(max_examples=25, deadline=None)
@given(data=batches(), protocol=st.sampled_from([4, 5]))
def test_a_batch_survives_every_way(data, protocol, tmp_path_factory):
    assert_same(pickle.loads(pickle.dumps(data, protocol)), data)
    assert_same(pickle.loads(pickle.dumps(data[:0], protocol)), data[:0])
    buffers = []
    message = pickle.dumps(data, 5, buffer_callback=buffers.append)
    assert_same(pickle.loads(message, buffers=[memoryview(b).toreadonly() for b in buffers]), data)
    path = tmp_path_factory.mktemp("file") / "batch"
    data.save_to_disk(path)
    assert_same(DataProto.load_from_disk(path), data)
    assert_same(DataProto.from_tensordict(data.to_tensordict()).select(meta_info_keys=[]), as_objects(data))


@settings(max_examples=25, deadline=None)
@given(data=batches(), size=st.integers(1, 4), seed=st.randoms())
def test_rows_taken_apart_and_joined_are_the_batch(data, size, seed):
    if len(data):
        assert_same(DataProto.concat(data.split(size)), data)
        order = list(range(len(data)))
        seed.shuffle(order)
        shuffled = data.select_idxs(order)
        shuffled.reorder(np.argsort(order))
        assert_same(shuffled, data)
        assert_same(data.repeat(size)[::size], data)
        assert_same(data.repeat(size, interleave=False).chunk(size)[-1], data)


def as_objects(data):
    """With arrays as they come from a TensorDict."""
    arrays = {name: array.tolist() for name, array in data.non_tensor_batch.items()}
    return DataProto.from_dict({} if data.batch is None else dict(data.batch.items()), arrays)


def test_a_message_holds_no_tensor_but_its_bytes_and_only_those_of_the_part():
    data = DataProto.from_dict({"x": torch.arange(1000)}, {"u": [{"a": 1}] * 1000})
    part, buffers = data.chunk(10)[1], []
    message = pickle.dumps(part, 5, buffer_callback=buffers.append)
    assert [len(b.raw()) for b in buffers][0] == 800 and len(message) < 500
    names = {arg for _, arg, _ in pickletools.genops(message) if isinstance(arg, str)}
    assert not {name for name in names if name.startswith(("torch", "tensordict", "numpy"))}
    arrived = pickle.loads(message, buffers=buffers)
    arrived.batch["x"].zero_()
    assert data.batch["x"].tolist() == list(range(1000))


def test_objects_without_a_plain_form_are_for_the_cluster_only(tmp_path):
    data = DataProto.from_dict({"x": torch.ones(2)}, {"image": [{1, 2}, {3}]}, {"config": {4}})
    again = pickle.loads(pickle.dumps(data))
    assert again.non_tensor_batch["image"].tolist() == [{1, 2}, {3}] and again.meta_info == {"config": {4}}
    with pytest.raises(DataProtoError, match=r"arrays\['image'\]: .*set.*meta\['config'\]"):
        data.save_to_disk(tmp_path / "batch")
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_whose_bytes_are_not_its_values_is_refused():
    data = DataProto.from_dict({"x": torch.eye(2).to_sparse()})
    with pytest.raises(DataProtoError, match=r"'x'.* layout torch.sparse_coo"):
        pickle.dumps(data)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(DataProtoError, match="no DataProto file. Pickles are not read"):
        DataProto.load_from_disk(path)
    DataProto.from_dict({"x": torch.ones(100)}).save_to_disk(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(DataProtoError, match="cut off: it lacks 8 bytes"):
        DataProto.load_from_disk(path)
    path.write_bytes(whole[:20])
    with pytest.raises(DataProtoError, match="damaged"):
        DataProto.load_from_disk(path)
    path.write_bytes(whole.replace(b"\xa7version\x01", b"\xa7version\x02"))
    with pytest.raises(DataProtoError, match="version 2"):
        DataProto.load_from_disk(path)


def test_a_subclass_stays_one():
    assert type(pickle.loads(pickle.dumps(Special()))) is Special
    assert type(Special()[:1]) is Special


class Special(DataProto):
    pass
