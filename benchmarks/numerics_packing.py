"""One optimizer step of the FSDP engine over rows of lognormal lengths, packed and padded. Part of `numerics.py`.

Both ways run the same rows in the same micro-batches of 16 rows, in the order in which they come, on a small llama:
padded, a micro-batch is as wide as its longest row. (A padded batch that is cut by a token budget instead is sorted by
length first and wastes less: `use_dynamic_bsz`.) No two rows share a prompt.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

ROWS, MICRO_BATCH = 64, 16
MEAN, SIGMA, LONGEST = 300, 0.8, 2048
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": LONGEST,
}


def lengths(rows: int = ROWS) -> list[int]:
    """Tokens of each row: lognormal with that mean."""
    mu = np.log(MEAN) - SIGMA**2 / 2
    drawn = np.random.default_rng(0).lognormal(mu, SIGMA, rows)
    return [int(n) for n in drawn.clip(8, LONGEST)]


def batch(row_lengths: list[int]) -> TensorDict:
    """Rows of random tokens, a fifth of each the prompt, with all that a policy update reads."""
    from rlflow.utils import tensordict_utils as tu

    g = torch.Generator().manual_seed(0)
    fields: dict[str, list[torch.Tensor]] = {}
    for n in row_lengths:
        ids = torch.randint(0, MODEL["vocab_size"], (n,), generator=g)
        response = ids[n // 5 :]
        row = {
            "input_ids": ids,
            "responses": response,
            "response_mask": torch.ones_like(response),
            "old_log_probs": torch.full((len(response),), -8.0),
            "advantages": torch.randn(len(response), generator=g),
        }
        for name, value in row.items():
            fields.setdefault(name, []).append(value)
    return tu.get_tensordict({name: tu.nested_from_list(rows) for name, rows in fields.items()})


def engine(path: str) -> Any:
    """A policy engine in this process, fp32, without recomputation."""
    from rlflow.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from rlflow.workers.engine.fsdp.engine import FSDPEngineWithLMHead

    built = FSDPEngineWithLMHead(
        HFModelConfig(path=path, enable_gradient_checkpointing=False),
        FSDPEngineConfig(dtype="float32"),
        FSDPOptimizerConfig(lr=1e-6, total_training_steps=1000),
    )
    built.initialize()
    return built


def measure(rounds: int = 3) -> dict[str, Any]:
    """{"seconds": {"padded": [...], "packed": [...]}, "tokens": ..., "padded_tokens": ...}; the ways alternate."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from rlflow.config import FSDPActorConfig
    from rlflow.utils import tensordict_utils as tu
    from rlflow.workers.losses import ppo_loss

    disable_progress_bar()
    drawn = lengths()
    data, loss = batch(drawn), partial(ppo_loss, config=FSDPActorConfig())
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(folder)
        policy = engine(folder)

    def step(rows: TensorDict, packed: bool) -> float:
        options = {
            "use_remove_padding": packed,
            "share_prompts": False,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": MICRO_BATCH,
        }
        started = time.perf_counter()
        policy.train_batch(tu.assign_non_tensor_whole(rows.copy(), options), loss)
        return time.perf_counter() - started

    seconds: dict[str, list[float]] = {"padded": [], "packed": []}
    with policy.train_mode():
        for way in seconds:  # kernels, optimizer state and memory are there before
            step(tu.slice_tensordict(data, 0, MICRO_BATCH), way == "packed")
        for _ in range(rounds):
            for way, times in seconds.items():
                times.append(step(data, way == "packed"))
    blocks = [drawn[i : i + MICRO_BATCH] for i in range(0, len(drawn), MICRO_BATCH)]
    return {
        "seconds": seconds,
        "tokens": sum(drawn),
        "padded_tokens": sum(len(block) * max(block) for block in blocks),
    }
