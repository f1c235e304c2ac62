"""Floating-point operations of training, and the share of a device's peak that a run reaches (MFU).

Dense decoder, forward and backward (3 x the forward):
    N     = layers (3 h ffn + h (q + k + v + o)) + 2 V h                parameters in matrix products
    FLOPs = 6 N tokens + 6 sum(L^2) head_dim heads layers               attention pairs, L = length of a row
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)

# Peak dense bf16 operations a second, by a part of the device's name; longer names are looked up first.
_PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H100": 989e12,
    "H800": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "MI300X": 1307e12,
    "L40S": 362.05e12,
    "L40": 181.05e12,
    "A40": 149.7e12,
    "L20": 119.5e12,
    "H20": 148e12,
    "910B": 354e12,
    "Ascend910": 354e12,
}

_DENSE = {
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "minicpm",
    "seed_oss",
    "glm4",
    "mimo",
    "smollm3",
    "gemma",
    "phi3",
    "granite",
}


def get_device_flops(device_name: str) -> float | None:
    """Peak bf16 FLOP/s of a device by its name ("NVIDIA H100 80GB HBM3"); None when unknown."""
    for key in sorted(_PEAK_FLOPS, key=lambda name: (-len(name), name)):
        if key in device_name:
            return _PEAK_FLOPS[key]
    return None


class FlopsCounter:
    """FLOPs of a model by its transformers config; `known` is false for architectures without a formula."""

    def __init__(self, hf_config: Any) -> None:
        text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
        self.config = text
        self.known = text.model_type in _DENSE
        if not self.known:
            logger.info("no FLOPs formula for model_type %s: MFU is not reported", text.model_type)

    def train_flops(self, lengths: Sequence[int]) -> float:
        """FLOPs of forward and backward over rows of these lengths; a forward alone is a third."""
        c = self.config
        hidden, layers, heads = c.hidden_size, c.num_hidden_layers, c.num_attention_heads
        kv_heads = getattr(c, "num_key_value_heads", None) or heads
        head_dim = getattr(c, "head_dim", None) or hidden // heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        params = layers * (3 * hidden * c.intermediate_size + attention) + 2 * c.vocab_size * hidden
        pairs = sum(length * length for length in lengths)
        return 6.0 * params * sum(lengths) + 6.0 * pairs * head_dim * heads * layers

    def estimate_flops(self, batch_seqlens: Sequence[int], delta_time: float) -> tuple[float, float | None]:
        """(achieved TFLOP/s, peak TFLOP/s of this device or None when it is unknown)."""
        peak = self.device_peak()
        achieved = self.train_flops(batch_seqlens) / delta_time / 1e12 if self.known and delta_time > 0 else 0.0
        return achieved, None if peak is None else peak / 1e12

    @staticmethod
    def device_peak() -> float | None:
        """Peak FLOP/s of the device of this process; None for a CPU or an unknown device."""
        from rlflow.utils.device import get_device_name

        if get_device_name() != "cuda":
            return None
        import torch

        return get_device_flops(torch.cuda.get_device_name())
