"""What one token costs in a transformer, by its transformers config.

A layer multiplies matrices (so many multiply-adds a token) and attends: row token i to i + 1 keys, or to `window` keys
at most. `width` is what one attention pair costs, the mean of the query-key and the value dimensions over all heads:

    gated MLP              3 h ffn                              (llama and its like; gate, up, down)
    plain MLP              2 h ffn                              (starcoder2, gpt_neox, phi)
    grouped-query          h d (2 heads + 2 kv heads)           width = heads d
    multi-head latent      (h q_rank + q_rank heads d_qk  or  h heads d_qk) + h (kv_rank + d_rope)
                           + kv_rank heads (d_nope + d_v) + heads d_v h          width = heads (d_qk + d_v) / 2
    experts                topk 3 h ffn_e + h experts (router) + 3 h ffn_shared (+ h for a gate of the shared expert)
    output head            V h
    vision block           4 v^2 + its MLP; attention without a mask, inside an image (or its windows)

Left out, because they are small beside these: norms, activations, rotary embeddings, biases, softmax, sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GATED = {
    "cohere",
    "ernie4_5",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4",
    "granite",
    "hunyuan_v1_dense",
    "llama",
    "mimo",
    "minicpm",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2_5_vl_text",
    "qwen2_vl_text",
    "qwen3",
    "qwen3_vl_text",
    "seed_oss",
    "smollm3",
}
PLAIN = {"gpt_neox", "phi", "starcoder2"}
EXPERTS = {
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_vl_moe_text",
}
LATENT_ATTENTION = {"deepseek_v2", "deepseek_v3"}
VISION = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}


@dataclass(frozen=True)
class Cost:
    """Multiply-adds of a token and of its attention.

    Attributes:
        layers: multiply-adds of a token in the matrix products of all layers (for vision: patch embedding and merger
            too).
        vocabulary: V h, of the output head; 0 for vision.
        attention: (width, window or None) of every layer.
    """

    layers: float
    vocabulary: int
    attention: tuple[tuple[float, int | None], ...]


def text_cost(config: Any) -> Cost | None:
    """Cost of a decoder by its text config; None for an architecture without a formula."""
    kind = config.model_type
    windows = _windows(config)
    if windows is None or kind not in GATED | PLAIN | EXPERTS:
        return None
    attention, width = _latent_attention(config) if kind in LATENT_ATTENTION else _grouped_query_attention(config)
    layers = sum(attention + _mlp(config, layer) for layer in range(config.num_hidden_layers))
    return Cost(layers, config.vocab_size * config.hidden_size, tuple((width, window) for window in windows))


def vision_cost(config: Any) -> Cost | None:
    """Cost of an image patch in the vision tower of a whole config; None without a tower that has a formula."""
    if config.model_type not in VISION:
        return None
    vision = config.vision_config
    hidden = vision.embed_dim if config.model_type == "qwen2_vl" else vision.hidden_size
    if config.model_type == "qwen2_vl":
        out, mlp = vision.hidden_size, 2 * hidden * int(hidden * vision.mlp_ratio)
    else:
        gated = config.model_type == "qwen2_5_vl"
        out, mlp = vision.out_hidden_size, (3 if gated else 2) * hidden * vision.intermediate_size
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 * hidden
    merged = hidden * vision.spatial_merge_size**2
    mergers = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    merger = mergers * merged * (merged + out) / vision.spatial_merge_size**2
    full = getattr(vision, "fullatt_block_indexes", None)
    window = (vision.window_size // vision.patch_size) ** 2 if full is not None else None
    windows = [None if full is None or block in full else window for block in range(vision.depth)]
    blocks = vision.depth * (4 * hidden**2 + mlp)
    return Cost(blocks + patch + merger, 0, tuple((hidden, window) for window in windows))


def _windows(config: Any) -> list[int | None] | None:
    """The attention window of every layer (None: all keys); None when some layer does not attend like this."""
    window = getattr(config, "sliding_window", None) or None
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    known = {"full_attention": None, "sliding_attention": window}
    return [known[name] for name in types] if set(types) <= set(known) else None


def _grouped_query_attention(config: Any) -> tuple[int, float]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    return hidden * head_dim * (2 * heads + 2 * kv_heads), head_dim * heads


def _latent_attention(config: Any) -> tuple[int, float]:
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1), not absorbed, as in training."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    query_key = config.qk_nope_head_dim + config.qk_rope_head_dim
    rank = config.q_lora_rank
    query = hidden * heads * query_key if rank is None else hidden * rank + rank * heads * query_key
    compressed = hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
    key_value = config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    output = heads * config.v_head_dim * hidden
    return query + compressed + key_value + output, heads * (query_key + config.v_head_dim) / 2


def _mlp(config: Any, layer: int) -> int:
    hidden = config.hidden_size
    if config.model_type in PLAIN:
        return 2 * hidden * config.intermediate_size
    if config.model_type in EXPERTS and _has_experts(config, layer):
        return _experts(config)
    return 3 * hidden * config.intermediate_size


def _has_experts(config: Any, layer: int) -> bool:
    first_dense = getattr(config, "first_k_dense_replace", None) or 0
    step = getattr(config, "decoder_sparse_step", None) or 1
    dense = getattr(config, "mlp_only_layers", None) or ()
    return layer >= first_dense and (layer + 1) % step == 0 and layer not in dense


def _experts(config: Any) -> int:
    hidden = config.hidden_size
    count = next(
        getattr(config, name)
        for name in ("n_routed_experts", "num_local_experts", "num_experts")
        if hasattr(config, name)
    )
    size = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    shared = size * (getattr(config, "n_shared_experts", None) or 0)
    gate = 0
    if config.model_type == "qwen2_moe":
        shared, gate = config.shared_expert_intermediate_size, hidden
    return 3 * hidden * (config.num_experts_per_tok * size + shared) + hidden * count + gate
