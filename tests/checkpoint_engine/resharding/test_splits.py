"""How weights split: by the model's plan, by heads, and each kind of a fused weight by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlflow.checkpoint_engine.resharding.boxes import Part
from rlflow.checkpoint_engine.resharding.splits import UnsplittableError, split_weights, stage_of

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
LAYER = "model.layers.1."


def shapes_of(config: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def spans(part: Part, dim: int) -> list[tuple[int, int]]:
    return [(box.start[dim], box.size[dim]) for box in part]


@pytest.mark.parametrize("config_cls", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Gemma3TextConfig])
def test_families_split_by_their_plan(config_cls: type) -> None:
    config = config_cls(**SIZES)
    shapes = shapes_of(config)
    splits = split_weights(config, shapes)
    kinds = {name.removeprefix(LAYER): split.kind for name, split in splits.items() if name.startswith(LAYER)}
    column = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"}
    row = {"self_attn.o_proj.weight", "mlp.down_proj.weight"}
    assert {name for name, kind in kinds.items() if kind == "row"} == row
    assert {n.removesuffix(".weight").removesuffix(".bias") for n, kind in kinds.items() if kind == "column"} == column
    assert splits["model.norm.weight"].kind == "replicated"
    # Rows of the vocabulary, where the family's plan has it.
    vocabulary = "column" if config_cls is Gemma3TextConfig else "replicated"
    assert splits["model.embed_tokens.weight"].kind == vocabulary


@pytest.mark.parametrize("config_cls", [LlamaConfig, Qwen2Config, Phi3Config, Qwen3MoeConfig])
@pytest.mark.parametrize("slots", [1, 2])
def test_slots_cover_each_split_weight_once(config_cls: type, slots: int) -> None:
    config = config_cls(**SIZES)
    shapes = shapes_of(config)
    for name, split in split_weights(config, shapes).items():
        boxes = [box for slot in range(slots) for box in split.part(shapes[name], slot, slots)]
        copies = slots if split.dim is None else 1
        assert sum(box.numel for box in boxes) == copies * torch.Size(shapes[name]).numel(), name
        if copies == 1:
            assert all(a.cut(b) is None for i, a in enumerate(boxes) for b in boxes[:i]), name


def test_a_bias_follows_its_weight() -> None:
    config = Qwen2Config(**SIZES)
    shapes = shapes_of(config)
    splits = split_weights(config, shapes)
    assert spans(splits[f"{LAYER}self_attn.q_proj.bias"].part((32,), 1, 2), 0) == [(16, 16)]
    # The output of a row-split layer is a sum: its bias is added once, so nobody cuts it.
    biased = LlamaConfig(**SIZES, attention_bias=True)
    assert split_weights(biased, shapes_of(biased))[f"{LAYER}self_attn.o_proj.bias"].kind == "replicated"


def test_fused_weights_split_each_kind_by_itself() -> None:
    config = Phi3Config(**SIZES)
    shapes = shapes_of(config)
    splits = split_weights(config, shapes)
    qkv = f"{LAYER}self_attn.qkv_proj.weight"  # rows: 4 x 8 of q, 2 x 8 of k, 2 x 8 of v
    assert spans(splits[qkv].part(shapes[qkv], 1, 2), 0) == [(16, 16), (40, 8), (56, 8)]
    fused = f"{LAYER}mlp.gate_up_proj.weight"
    assert spans(splits[fused].part(shapes[fused], 0, 2), 0) == [(0, 8), (16, 8)]


def test_packed_experts_split_inside_every_expert() -> None:
    config = Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=8)
    shapes = shapes_of(config)
    splits = split_weights(config, shapes)
    packed = f"{LAYER}mlp.experts.gate_up_proj"
    assert spans(splits[packed].part(shapes[packed], 1, 2), 1) == [(4, 4), (12, 4)]
    assert splits[f"{LAYER}mlp.experts.down_proj"].kind == "row"
    assert splits[f"{LAYER}mlp.gate.weight"].kind == "replicated"


def test_neighbours_share_a_key_value_head_when_there_are_fewer_heads_than_ranks() -> None:
    config = LlamaConfig(**SIZES)
    shapes = shapes_of(config)
    key = f"{LAYER}self_attn.k_proj.weight"
    parts = [split_weights(config, shapes)[key].part(shapes[key], slot, 4) for slot in range(4)]
    assert [spans(part, 0) for part in parts] == [[(0, 8)], [(0, 8)], [(8, 8)], [(8, 8)]]


def test_what_an_engine_cuts_itself_stays_whole() -> None:
    config = LlamaConfig(**SIZES, tie_word_embeddings=False)
    shapes = shapes_of(config)
    assert split_weights(config, shapes)["lm_head.weight"].kind == "column"
    assert split_weights(config, shapes, keep_whole=("lm_head",))["lm_head.weight"].kind == "replicated"


def test_what_cannot_be_split_is_said() -> None:
    gpt2 = GPT2Config(n_layer=1, n_embd=8, n_head=2)
    with pytest.raises(UnsplittableError, match="no tensor-parallel plan"):
        split_weights(gpt2, {"transformer.wte.weight": (4, 8)})
    config = LlamaConfig(**SIZES)
    shapes = shapes_of(config)
    name = f"{LAYER}self_attn.q_proj.weight"
    with pytest.raises(UnsplittableError, match="4 inseparable parts"):
        split_weights(config, shapes)[name].part(shapes[name], 0, 3)


def test_stages_hold_layers_evenly() -> None:
    names = ["model.embed_tokens.weight", "model.layers.0.a", "model.layers.3.a", "model.norm.weight", "lm_head.weight"]
    assert [stage_of(name, 4, 2) for name in names] == [0, 0, 1, 1, 1]
    with pytest.raises(UnsplittableError):
        stage_of("model.layers.0.a", 3, 2)
