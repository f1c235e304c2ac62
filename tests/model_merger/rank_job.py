"""Save checkpoints from one rank of a process group: `python rank_job.py JSON`, with torchrun's environment."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def save(role: str, model: str, folder: str, contents: list[str]) -> None:
    from rlflow.config import CheckpointConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from rlflow.workers.engine import EngineRegistry

    engine = EngineRegistry.new(
        "value_model" if role == "critic" else "language_model",
        backend="fsdp",
        model_config=HFModelConfig(path=model, enable_gradient_checkpointing=False),
        engine_config=FSDPEngineConfig(dtype="float32", max_token_len_per_gpu=512),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=1),
        checkpoint_config=CheckpointConfig(save_contents=contents, load_contents=["model"]),
    )
    engine.initialize()
    engine.save_checkpoint(folder, global_step=3)


if __name__ == "__main__":
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("RLFLOW_DEVICE", "cpu")
    for job in json.loads(sys.argv[1]):
        save(**job)
    dist.destroy_process_group()
