"""One whole run on a CUDA device: FSDP2 over NCCL, the embedded engine on the GPU, weight sync, validation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_on_the_gpu_trains_and_syncs(
    dtype: str,
    run_trainer: Callable[..., Any],
    tiny_overrides: list[str],
    read_metrics: Callable[[], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    run_trainer(
        [
            *tiny_overrides,
            "trainer.device=cuda",
            f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}",
            f"actor_rollout_ref.rollout.dtype={dtype}",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "trainer.test_freq=2",
            "trainer.save_freq=2",
        ]
    )
    lines = read_metrics()
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["data"]["actor/grad_norm"] > 0
        # bf16 on different kernels: looser than fp32, still far from unrelated weights.
        limit = 1e-3 if dtype == "float32" else 0.2
        assert line["data"]["training/rollout_log_probs_diff/mean"] < limit
    assert (tmp_path / "checkpoints" / "global_step_2" / "actor").is_dir()
