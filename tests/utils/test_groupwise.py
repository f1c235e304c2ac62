"""Groups by number and name, and their statistics."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rlflow.utils
from rlflow.utils.groupwise import as_torch_index, group_mean_std


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (torch.tensor([7, 3, 7]), [7, 3, 7]),
        (np.array([7, 3, 7], dtype=np.int32), [7, 3, 7]),
        ([2.0, 1.0000001, 2.0], [2, 1, 2]),
        (["10", "9", "10"], [10, 9, 10]),
        (np.array(["4", 4, 5.0], dtype=object), [4, 4, 5]),
        ([str(2**60 + 1)], [2**60 + 1]),
        (["b", "a", "b"], [1, 0, 1]),
        ([0.5, 0.25, 0.5], [1, 0, 1]),
        ([("x", 1), ("y", 2), ("x", 1)], [0, 1, 0]),
        ([None, "a", None], [0, 1, 0]),
        ([float("nan"), 1.0], [1, 0]),
        ([], []),
    ],
)
def test_numbers_are_kept_and_names_are_numbered(index: object, expected: list[int]) -> None:
    result = as_torch_index(index)
    assert result.dtype == torch.int64 and result.tolist() == expected


def test_the_device_is_the_argument_or_what_the_environment_forces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_torch_index([1]).device.type == "cpu", "under pytest"
    assert as_torch_index([1], device="meta").device.type == "meta"
    monkeypatch.setenv("VERL_FORCE_DEVICE", "meta")
    assert as_torch_index([1]).device.type == "meta"
    monkeypatch.setenv("RLFLOW_FORCE_DEVICE", "cpu")
    assert as_torch_index([1]).device.type == "cpu"


def test_mean_std_and_count_of_groups_with_a_gap_and_a_single() -> None:
    mean, std, count = group_mean_std(torch.tensor([1.0, 3.0, 5.0, 4.0]), torch.tensor([0, 0, 3, 1]))
    assert mean.tolist() == [2.0, 0.0, 0.0, 0.0]
    assert std.tolist() == pytest.approx([2**0.5, 1.0, 1.0, 1.0])
    assert count.tolist() == [2.0, 1.0, 0.0, 1.0]
    assert [t.numel() for t in group_mean_std(torch.zeros(0), torch.zeros(0, dtype=torch.int64))] == [0, 0, 0]


def test_the_variance_has_a_floor_and_survives_large_values() -> None:
    group = torch.zeros(3, dtype=torch.int64)
    assert group_mean_std(torch.full((3,), 0.1), group)[1].item() == pytest.approx(1e-3)
    assert group_mean_std(torch.full((3,), 0.1), group, eps=0.0)[1].item() == 0.0
    large = torch.tensor([10_000.0, 10_000.5, 10_001.0])
    assert group_mean_std(large, group, eps=0.0)[1].item() == pytest.approx(0.5)
    assert group_mean_std(large.half().float().bfloat16(), group)[0].dtype == torch.float32


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-1e3, 1e3)), min_size=1, max_size=40))
def test_moments_are_those_of_numpy(rows: list[tuple[int, float]]) -> None:
    group, scores = (np.array(column) for column in zip(*rows, strict=True))
    mean, std, count = group_mean_std(torch.tensor(scores), torch.tensor(group), eps=0.0)
    for g in range(group.max() + 1):
        members = scores[group == g]
        assert count[g] == len(members)
        if len(members) > 1:
            assert mean[g].item() == pytest.approx(members.mean(), rel=1e-5, abs=1e-5)
            assert std[g].item() == pytest.approx(members.std(ddof=1), rel=1e-5, abs=1e-5)


def test_the_names_are_reached_through_the_package_without_making_it_heavy() -> None:
    assert rlflow.utils.as_torch_index is as_torch_index and rlflow.utils.group_mean_std is group_mean_std
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rlflow.utils.nothing  # noqa: B018
    code = "import rlflow.utils, sys; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
