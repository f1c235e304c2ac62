"""The gradient norm counts every element of the model once, however its parts are sharded."""

from __future__ import annotations

import pytest
import torch

from rlflow.workers.engine.fsdp.optim import grad_norm


def test_a_norm_that_float32_holds_does_not_overflow():
    assert grad_norm([torch.tensor([3e25]), torch.tensor([4e25])]) == pytest.approx(5e25)
    assert grad_norm([]) == 0.0


def test_sharded_replicated_and_plain_gradients_together(run_ranks):
    result = run_ranks(4, "norms")
    for layout, (norm, clipped) in result["norms"].items():
        assert norm == pytest.approx(result["expected"], rel=1e-6), layout
        assert clipped == pytest.approx(1.0, rel=1e-5), layout
