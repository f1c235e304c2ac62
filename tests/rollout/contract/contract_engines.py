"""The engines that the contract suite runs against, and the model it serves with them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rollout_tiny as tiny

MAX_MODEL_LEN = 640
MAX_NUM_SEQS = 8
# More than a block of any engine's prefix cache (vLLM on CPU: 128 tokens).
LONG_PROMPT = 300


@dataclass(frozen=True)
class EngineCase:
    """How one engine is set up for the suite.

    `package` must be importable, or the engine's tests are skipped. `log_prob_atol`: nats, for fp32 weights.
    """

    name: str
    package: str
    rollout: dict[str, Any] = field(default_factory=dict)
    log_prob_atol: float = 1e-4

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


CASES = {
    "hf": EngineCase("hf", "transformers", {"engine_kwargs": {"hf": {"kv_cache_gb": 0.25}}}),
    "vllm": EngineCase(
        "vllm", "vllm", {"engine_kwargs": {"vllm": {"kv_cache_memory_bytes": 2**28, "enforce_eager": True}}}
    ),
    "sglang": EngineCase("sglang", "sglang"),
}


def save_model(folder: Path) -> str:
    """A tiny Llama in fp32 (heads of 32, which every engine has kernels for) that ends its sequences by itself.

    Its end-of-sequence token is one that greedy generation comes to, and its own generation config asks for sampling
    that no engine may fall back on.
    """
    import json

    # Neither special token of the helper is sampled by accident.
    sizes = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 1024}
    tiny.save_model(folder, **sizes)
    tokens = greedy(tiny.plain_model(str(folder)), EOS_PROMPT, 12)
    eos = next(t for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text()) | {"eos_token_id": eos}
        if name == "generation_config.json":
            values |= {"do_sample": True, "temperature": 0.2, "top_k": 2, "top_p": 0.3, "repetition_penalty": 1.7}
        (folder / name).write_text(json.dumps(values))
    return str(folder)


EOS_PROMPT = tiny.prompts(1, seed=99)[0]


def greedy(model: Any, prompt: list[int], count: int, *, penalty: float = 1.0) -> list[int]:
    """`count` tokens of transformers' own greedy `generate`, whatever the model's generation config says."""
    import torch
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=False, max_new_tokens=count, repetition_penalty=penalty, pad_token_id=0)
    config.eos_token_id = None
    model.generation_config = config
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return out[0, len(prompt) :].tolist()
