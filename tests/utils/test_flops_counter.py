"""FLOPs by hand, beside torch's own count of a forward, and peaks by device name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from rlflow.utils import model_flops
from rlflow.utils.flops_counter import FlopsCounter, get_device_flops, linear_work_per_token
from rlflow.utils.model_flops import text_cost, vision_cost

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 20,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 8}),
    "gemma3_text": ("Gemma3", {"head_dim": 16, "sliding_window": 8}),
    "phi3": ("Phi3", {}),
    "granite": ("Granite", {}),
    "olmo2": ("Olmo2", {}),
    "cohere": ("Cohere", {}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "smollm3": ("SmolLM3", {}),
    "seed_oss": ("SeedOss", {"head_dim": 8}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 8}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": 8}),
    "starcoder2": ("Starcoder2", {}),
    "phi": ("Phi", {}),
    "gpt_neox": ("GPTNeoX", {"num_key_value_heads": 4}),  # it has no groups
    "mixtral": ("Mixtral", EXPERTS),
    "olmoe": ("Olmoe", EXPERTS),
    "gpt_oss": ("GptOss", EXPERTS | {"head_dim": 8, "sliding_window": 8}),
    "qwen2_moe": ("Qwen2Moe", EXPERTS | {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 28}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"moe_intermediate_size": 20, "mlp_only_layers": [1], "head_dim": 16}),
    "glm4_moe": (
        "Glm4Moe",
        {
            "moe_intermediate_size": 20,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 8,
        },
    ),
    "deepseek_v2": ("DeepseekV2", LATENT | {"n_group": 1}),
    "deepseek_v3": ("DeepseekV3", LATENT),
}


def config_of(kind: str) -> Any:
    name, options = FAMILIES[kind]
    suffix = "TextConfig" if kind == "gemma3_text" else "Config"
    config = getattr(transformers, name + suffix)(**(TINY | options))
    assert config.model_type == kind
    return config


def counted(call: Any, *skip: str) -> int:
    """FLOPs of a call by torch, without those of the modules whose name ends so."""
    with FlopCounterMode(display=False) as mode:
        call()
    modules = {name: sum(ops.values()) for name, ops in mode.get_flop_counts().items()}
    return mode.get_total_flops() - sum(flops for name, flops in modules.items() if name.endswith(skip))


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_forward_has_the_matrix_products_of_the_formula(kind: str) -> None:
    """torch counts whole squares of attention (the mask hides half of them) and no lookup of embeddings."""
    config = config_of(kind)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    cost = text_cost(config)
    for tokens in (4, 11):
        ids = torch.arange(1, tokens + 1).unsqueeze(0)
        with torch.no_grad():
            found = counted(lambda ids=ids: model(ids, use_cache=False), "rotary_emb", "rotary_emb_local")
        square = 4 * tokens**2 * sum(width for width, _ in cost.attention)
        assert found == 2 * (cost.layers + cost.vocabulary) * tokens + square


def test_every_family_is_compared_or_has_no_class_in_transformers() -> None:
    remote_code = {"mimo", "minicpm"}
    towers = {"qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"}  # below
    assert set(FAMILIES) | remote_code | towers == model_flops.GATED | model_flops.PLAIN | model_flops.EXPERTS


def test_a_dense_decoder_by_hand() -> None:
    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=10,
    )
    params = 2 * (3 * 8 * 16 + 8 * (8 + 4 + 4 + 8)) + 2 * 10 * 8
    expected = 6 * params * 5 + 6 * (9 + 4) * 2 * 4 * 2
    counter = FlopsCounter(config)
    assert counter.train_flops([3, 2]) == expected
    achieved, peak = counter.estimate_flops([3, 2], 2.0)
    assert achieved == pytest.approx(expected / 2 / 1e12)
    assert math.isinf(peak), "a CPU has no known peak"
    critic = FlopsCounter(config, vocab_head=False)
    assert critic.train_flops([3, 2]) == expected - 6 * 2 * 10 * 8 * 5


def test_latent_attention_and_experts_by_hand() -> None:
    cost = text_cost(config_of("deepseek_v3"))
    attention = 32 * 12 + 12 * 4 * 10 + 32 * (16 + 4) + 16 * 4 * (6 + 10) + 4 * 10 * 32
    dense, experts = 3 * 32 * 48, 3 * 32 * 20 * (2 + 1) + 32 * 4
    assert cost.layers == 3 * attention + dense + 2 * experts
    assert cost.attention == ((4 * (10 + 10) / 2, None),) * 3
    plain_query = config_of("deepseek_v3")
    plain_query.q_lora_rank = None
    assert text_cost(plain_query).layers == cost.layers + 3 * (32 * 4 * 10 - 32 * 12 - 12 * 4 * 10)


def test_a_window_counts_the_pairs_inside_it() -> None:
    config = config_of("gemma2")
    windows = [window for _, window in text_cost(config).attention]
    assert windows == [8, None, 8]
    counter = FlopsCounter(config)
    width = 4 * 16

    def pairs(length: int, window: int | None) -> int:
        """Keys of every token, twice: the square of a causal row of full length."""
        keys = [min(i + 1, window or length) for i in range(length)]
        return 2 * sum(keys) - sum(1 for i in range(length) if window is None or i < window)

    for lengths in ([5], [8, 3], [20, 30]):
        linear = 6 * (text_cost(config).layers + 2 * 96 * 32) * sum(lengths)
        attention = 6 * width * sum(pairs(length, window) for length in lengths for window in windows)
        assert counter.train_flops(lengths) == linear + attention


VISION = {"depth": 3, "in_channels": 3, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}


def tower(kind: str) -> tuple[Any, type]:
    text = TINY | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}}
    if kind == "qwen2_vl":
        vision = VISION | {"embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 3}
        return transformers.Qwen2VLConfig(text_config=text, vision_config=vision), (
            transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel
        )
    common = VISION | {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    if kind == "qwen2_5_vl":
        vision = common | {"fullatt_block_indexes": [0, 1, 2], "window_size": 16}
        return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision), (
            transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel
        )
    vision = common | {"deepstack_visual_indexes": [1], "num_position_embeddings": 64}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision), (
        transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel
    )


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_vision_tower_has_the_products_of_the_formula(kind: str) -> None:
    config, tower_class = tower(kind)
    torch.manual_seed(0)
    config.vision_config._attn_implementation = "eager"
    model = tower_class(config.vision_config).eval()
    cost = vision_cost(config)
    grid = torch.tensor([[1, 4, 6]])
    patches = 24
    pixels = torch.randn(patches, 3 * 2 * 4 * 4)
    with torch.no_grad():
        found = counted(lambda: model(pixels, grid_thw=grid), "rotary_pos_emb")
    assert found == 2 * cost.layers * patches + 4 * patches**2 * sum(width for width, _ in cost.attention)
    counter = FlopsCounter(config)
    assert counter.known, "its text part is a dense decoder"
    assert counter.train_flops([5], images_seqlens=[patches]) == counter.train_flops([5]) + 3 * found
    assert counter.estimate_flops([5], 1.0, images_seqlens=[patches])[0] > counter.estimate_flops([5], 1.0)[0]


def test_windows_of_a_vision_tower() -> None:
    config, _ = tower("qwen2_5_vl")
    config.vision_config.fullatt_block_indexes = [1]
    assert [window for _, window in vision_cost(config).attention] == [16, None, 16]
    extra = FlopsCounter(config).train_flops([], images_seqlens=[64])
    assert extra == 6 * vision_cost(config).layers * 64 + 12 * 16 * (64 * 64 + 2 * 64 * 16)


def test_an_unknown_architecture_or_device_reports_nothing() -> None:
    mamba = FlopsCounter(transformers.MambaConfig())
    assert not mamba.known
    assert mamba.train_flops([5]) == 0 and mamba.estimate_flops([5], 1.0)[0] == 0
    linear = config_of("qwen3")
    linear.layer_types = ["linear_attention", "full_attention", "full_attention"]
    assert not FlopsCounter(linear).known
    images_of_a_text_model = FlopsCounter(config_of("llama"))
    assert images_of_a_text_model.train_flops([5], images_seqlens=[16]) == 0
    assert math.isinf(get_device_flops(device_name="Some Future Chip"))
    with pytest.raises(ValueError, match="unit='X'"):
        get_device_flops("X", "NVIDIA H200")


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
    ],
)
def test_peaks_are_found_by_name(device: str, peak: float) -> None:
    assert get_device_flops("T", device) == pytest.approx(peak)
    assert get_device_flops("G", device) == pytest.approx(peak * 1000)


def test_the_work_of_a_token_comes_from_the_model() -> None:
    usual = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 0,
        "pad_token_id": None,
    }
    # 4 h^2 of attention and 3 h ffn = 8 h^2
    config = transformers.LlamaConfig(**usual, intermediate_size=512 // 3 + 1, num_hidden_layers=5)
    assert linear_work_per_token(config) == pytest.approx(6 * 64, rel=0.01)
    assert linear_work_per_token(transformers.MambaConfig(hidden_size=100)) == 600
    small_vocabulary, large = (config_of("llama") for _ in range(2))
    large.vocab_size = 10 * small_vocabulary.vocab_size
    assert linear_work_per_token(large) > linear_work_per_token(small_vocabulary)
