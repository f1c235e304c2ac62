"""A whole GRPO run whose rollout engine is the real vLLM on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def served_model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """The tiny model with heads of 32, the smallest that vLLM's attention on a CPU has."""
    import shutil

    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder)
    config = AutoConfig.from_pretrained(tiny_model_dir)
    config.hidden_size, config.head_dim = 128, 32
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.timeout(400)
def test_a_run_trains_with_vllm(
    run_trainer: Callable[..., Any],
    tiny_overrides: list[str],
    served_model: Path,
    read_metrics: Callable[[], list[dict[str, Any]]],
) -> None:
    pytest.importorskip("vllm")
    options = [
        f"actor_rollout_ref.model.path={served_model}",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.max_num_seqs=8",
        "trainer.total_training_steps=2",
    ]
    run_trainer([*tiny_overrides, *options])
    lines = {line["step"]: line["data"] for line in read_metrics()}
    assert sorted(lines) == [1, 2]
    assert lines[1]["actor/grad_norm"] > 0
    for step in (1, 2):  # of the second step only if the first one's weights reached vLLM
        assert lines[step]["training/rollout_log_probs_diff/max"] < 1e-3
