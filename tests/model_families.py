"""The families of text models that tests go through: (transformers' name, options of its config) of a tiny one.

Windows are shorter than the rows of the tests, caps low enough to bend the scores.
"""

from __future__ import annotations

from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA = {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3": ("Llama", {"rope_parameters": _LLAMA3_ROPE}),
    "SmolLM2": ("Llama", {"tie_word_embeddings": True}),
    "SmolLM3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "Qwen2.5": ("Qwen2", {}),
    "Qwen2.5, window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "Qwen3": ("Qwen3", {"head_dim": 32}),
    "Qwen3-MoE": ("Qwen3Moe", MOE),
    "Mistral": ("Mistral", {"sliding_window": 5}),
    "Mistral, no window": ("Mistral", {"sliding_window": None}),
    "Phi 3": ("Phi3", {"sliding_window": 5}),
    "Gemma 2": ("Gemma2", _GEMMA | {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}),
    "Gemma 3": ("Gemma3", _GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}),
}


def tiny_model(name: str, **options: Any) -> Any:
    """A causal LM of random weights, of the transformers classes called `name`; `options` of its config."""
    import transformers

    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    return getattr(transformers, f"{name}ForCausalLM")(config_class(**options))
