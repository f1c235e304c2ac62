"""Parameters and shapes of a model from its config file, without transformers and without its weights."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Usual models of recipes, for machines that have not downloaded them: hidden, ffn, layers, heads, key-value heads,
# head size, vocabulary, tied embeddings.
_KNOWN: dict[str, tuple[int, int, int, int, int, int, int, bool]] = {
    "Qwen/Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 64, 151936, True),
    "Qwen/Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 128, 151936, True),
    "Qwen/Qwen2.5-3B": (2048, 11008, 36, 16, 2, 128, 151936, True),
    "Qwen/Qwen2.5-7B": (3584, 18944, 28, 28, 4, 128, 152064, False),
    "Qwen/Qwen3-0.6B": (1024, 3072, 28, 16, 8, 128, 151936, True),
    "Qwen/Qwen3-1.7B": (2048, 6144, 28, 16, 8, 128, 151936, True),
    "Qwen/Qwen3-4B": (2560, 9728, 36, 32, 8, 128, 151936, True),
    "Qwen/Qwen3-8B": (4096, 12288, 36, 32, 8, 128, 151936, False),
}
_SUFFIXES = ("-Instruct", "-Base")


@dataclass(frozen=True)
class ModelSize:
    """Shapes of a decoder.

    Fields:
        ffn: width of the MLP; of an expert, where there are experts.
        experts, active_experts: 1 for a dense model.
        tied: embedding and output head are one matrix.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    experts: int = 1
    active_experts: int = 1

    @property
    def layer_parameters(self) -> int:
        """Of one layer; biases and norms are left out, which is below a thousandth."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.ffn * self.experts

    @property
    def root_parameters(self) -> int:
        """Of embedding and output head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.layers * self.layer_parameters + self.root_parameters

    def adapter_parameters(self, rank: int) -> int:
        """Of a LoRA adapter on every linear layer of the body."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * (self.hidden + q) + 2 * (self.hidden + kv)
        return self.layers * rank * (attention + 3 * (self.hidden + self.ffn) * self.experts)

    @property
    def kv_values(self) -> int:
        """Values that one token keeps in a cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def saved_values_of_a_layer(self) -> int:
        """Values that one token leaves in a layer for its backward: inputs of its products, and what stands between.

        Two norms keep their input and their result (4 h), rotation keeps queries and keys before and after, attention
        its inputs, output and the input of the output product, the MLP gate, up, the activation and their product.
        """
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return 6 * self.hidden + 4 * q + 4 * kv + 4 * self.ffn * self.active_experts


def model_size(path: str, config_path: str | None = None, overrides: dict[str, Any] | None = None) -> ModelSize | None:
    """Shapes of a model in a folder, in the hub's cache, or well known; None where nothing says them.

    Args:
        path: `model.path`.
        config_path: `model.hf_config_path`.
        overrides: `model.override_config`.
    """
    source = config_path or path
    config = _read(Path(source).expanduser()) or _read_cached(source)
    if config is None:
        return _well_known(source)
    text = config.get("text_config") or config
    changed = {**text, **((overrides or {}).get("model_config") or overrides or {})}
    try:
        return _from_config(changed, bool(config.get("tie_word_embeddings", changed.get("tie_word_embeddings", True))))
    except (KeyError, TypeError, ValueError):
        return None


def _from_config(config: dict[str, Any], tied: bool) -> ModelSize:
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    experts = int(config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 1)
    return ModelSize(
        hidden=hidden,
        ffn=int((config.get("moe_intermediate_size") if experts > 1 else None) or config["intermediate_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocab=int(config["vocab_size"]),
        tied=tied,
        experts=experts,
        active_experts=int(config.get("num_experts_per_tok") or 1) if experts > 1 else 1,
    )


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _read_cached(name: str) -> dict[str, Any] | None:
    """The config of a hub model that was downloaded before."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = sorted((hub / f"models--{name.replace('/', '--')}" / "snapshots").glob("*"))
    return next((config for folder in snapshots if (config := _read(folder)) is not None), None)


def _well_known(name: str) -> ModelSize | None:
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return ModelSize(*_KNOWN[name]) if name in _KNOWN else None
