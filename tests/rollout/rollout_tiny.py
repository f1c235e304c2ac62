"""A tiny causal LM on disk, the configuration that serves it, and the plain forward to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 512
EOS = 2


def save_model(folder: Path, *, tied: bool = True, seed: int = 0, **overrides: Any) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": tied,
            "bos_token_id": 1,
            "eos_token_id": EOS,
            "pad_token_id": 0,
        }
        | overrides
    )
    model = LlamaForCausalLM(config)
    for param in model.parameters():
        if param.dim() > 1:
            param.data.mul_(3)  # a distribution with preferences, and attention that matters
    model.save_pretrained(folder)
    return str(folder)


def plain_model(path: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def config(path: str, **rollout: Any) -> Any:
    """A whole configuration as far as the rollout room reads it."""
    from omegaconf import OmegaConf

    from rlflow.config import HFModelConfig, RolloutConfig

    values = {
        "name": "hf",
        "dtype": "float32",
        "prompt_length": 32,
        "response_length": 32,
        "max_num_seqs": 16,
        "load_format": "auto",
        "request_timeout_s": 60.0,
        "engine_kwargs": {"hf": {"kv_cache_gb": 0.5}},
        **rollout,
    }
    return OmegaConf.create(
        {
            "actor_rollout_ref": {
                "rollout": OmegaConf.to_container(OmegaConf.structured(RolloutConfig(**values))),
                "model": OmegaConf.to_container(OmegaConf.structured(HFModelConfig(path=path))),
            },
            "trainer": {"n_gpus_per_node": 2, "nnodes": 1, "device": "cpu"},
        }
    )


def log_probs_of(model: Any, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
    """log_softmax(logits / T) of the response's tokens by one plain forward; float32 [len(response)]."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    table = torch.log_softmax(logits / temperature, dim=-1)
    return table.gather(1, torch.tensor(response)[:, None])[:, 0]


def prompts(count: int, seed: int = 0, low: int = 3, high: int = 30) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
