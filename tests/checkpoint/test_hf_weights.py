"""Weight files that are written block by block are plain safetensors files."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rlflow.checkpoint.hf_weights import TensorSpec, plan_files, write_weights
from rlflow.checkpoint.shards import ShardReader
from rlflow.utils.errors import CheckpointError

TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "half": torch.arange(15).reshape(5, 3).bfloat16(),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(0, 4),
    "wide": torch.arange(7).double(),
    "plain": torch.randn(3, 2, 2),
}


def specs() -> list[TensorSpec]:
    return [TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in TENSORS.items()]


def rows(name: str) -> list[torch.Tensor]:
    value = TENSORS[name]
    return list(value.split(2)) if value.dim() else [value]


@pytest.mark.parametrize("limit", [10**9, 60, 1])
def test_what_was_written_is_read_by_safetensors(tmp_path, limit):
    files = write_weights(tmp_path, specs(), rows, max_bytes=limit)
    assert len(files) == {10**9: 1, 60: 4, 1: 6}[limit]
    loaded = {name: value for file in files for name, value in load_file(file).items()}
    assert loaded.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert loaded[name].dtype == value.dtype and torch.equal(loaded[name], value), name
    with safe_open(files[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (limit < 10**9)
    if limit < 10**9:
        assert set(json.loads(index.read_text())["weight_map"]) == set(TENSORS)


def test_blocks_are_cast_to_the_type_of_the_file(tmp_path):
    [file] = write_weights(tmp_path, [TensorSpec("plain", torch.float16, (3, 2, 2))], rows)
    assert torch.equal(load_file(file)["plain"], TENSORS["plain"].half())


def test_wide_types_come_first_so_that_all_are_aligned():
    [names] = [[spec.name for spec in part] for part in plan_files(specs()).values()]
    assert names == ["scalar", "wide", "empty", "plain", "half", "flags"]


def test_blocks_of_another_size_are_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"plain of shape \[4, 2, 2\] needs 64 bytes, got 48"):
        write_weights(tmp_path, [TensorSpec("plain", torch.float32, (4, 2, 2))], rows)


def test_a_type_without_a_code_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="complex64"):
        write_weights(tmp_path, [TensorSpec("plain", torch.complex64, (1,))], rows)


def test_an_index_of_another_format_is_refused(tmp_path):
    (tmp_path / "index.json").write_text('{"format": "other", "tensors": {}}')
    with pytest.raises(CheckpointError, match=r"index\.json is no index of format"):
        ShardReader(tmp_path)
