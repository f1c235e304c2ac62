"""A whole GRPO run that trains an adapter: its own reference, adapters to the rollout, files of both kinds.

That training goes on from such files is proved where they are made (tests/workers/test_lora.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file


@pytest.mark.timeout(240)
def test_a_run_trains_adapters_only(
    run_trainer: Callable[..., Any],
    tiny_overrides: list[str],
    tiny_model_dir: Path,
    tmp_path: Path,
    read_metrics: Callable[[], list[dict[str, Any]]],
) -> None:
    options = [
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.lora_alpha=8",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "actor_rollout_ref.actor.checkpoint.load_contents=[model,optimizer,extra]",
        "actor_rollout_ref.actor.checkpoint.save_lora_only=true",
        "trainer.save_freq=2",
        "actor_rollout_ref.rollout.checkpoint_engine.canary=always",
    ]
    run_trainer([*tiny_overrides, *options])
    lines = {line["step"]: line["data"] for line in read_metrics()}
    assert sorted(lines) == [1, 2]
    assert lines[1]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6), "a new adapter is its reference"
    assert lines[2]["actor/kl_loss"] > 1e-6
    assert lines[1]["actor/grad_norm"] > 0
    assert lines[2]["training/rollout_log_probs_diff/max"] < 1e-4, "the rollout samples with the adapter"
    # Two layers of seven linear layers, each with A and B; the base weights went before the first step.
    assert lines[2]["weight_sync/tensor_count"] == 28 and lines[2]["weight_sync/lora_modules"] == 14
    assert lines[2]["weight_sync/base_bytes"] == 0
    base_bytes = sum(value.numel() * 4 for value in load_file(tiny_model_dir / "model.safetensors").values())
    assert lines[2]["weight_sync/bytes"] < base_bytes / 7
    assert lines[2]["weight_sync/canary_error"] < 1e-4

    actor = tmp_path / "checkpoints" / "global_step_2" / "actor"
    saved = json.loads((actor / "model" / "index.json").read_text())["tensors"]
    assert saved and all(".lora_" in name for name in saved)
    adapter = load_file(actor / "lora_adapter" / "adapter_model.safetensors")
    assert any(bool(value.any()) for name, value in adapter.items() if "lora_B" in name)
    base = load_file(tiny_model_dir / "model.safetensors")
    merged = load_file(actor / "huggingface" / "model.safetensors")
    moved = {name for name in base if not torch.equal(base[name].bfloat16(), merged[name])}
    assert moved and all("_proj" in name for name in moved)
