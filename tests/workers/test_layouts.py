"""Tensors on a 2 x 2 mesh: however they lie there, every element counts once and comes back from the disk."""

from __future__ import annotations

import pytest
import torch

from rlflow.checkpoint.shards import ShardReader
from rlflow.workers.engine.fsdp.optim import grad_norm


def test_a_norm_that_float32_holds_does_not_overflow():
    assert grad_norm([torch.tensor([3e25]), torch.tensor([4e25])]) == pytest.approx(5e25)
    assert grad_norm([]) == 0.0


def test_gradient_norms_and_shards_do_not_depend_on_the_layout(run_ranks, tmp_path):
    result = run_ranks(4, "layouts", folder=str(tmp_path / "model"))
    for layout, (norm, clipped) in result["norms"].items():
        assert norm == pytest.approx(result["norm"], rel=1e-6), layout
        assert clipped == pytest.approx(1.0, rel=1e-5), layout
    assert result["read"], "read back into every layout"
    with ShardReader(tmp_path / "model") as reader:
        for name in result["names"]:
            assert torch.equal(reader.read(name, 0, 8), result["weight"]), name
