"""What a model's attention does beside the plain causal one, read from its transformers config.

The training engine and the embedded rollout engine both replace the attention of a model by their own. Both ask here
whether they may, and count afterwards that every layer asked for what the config says: a layer that attends by itself,
or that keeps its window to itself, would otherwise silently be another model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlflow.utils.errors import ContractError

# What layers are called that attend to all earlier tokens, or to the last ones only.
FULL = ("full_attention", "attention")
SLIDING = "sliding_attention"
# Model types whose every head has a sink, a score that no key stands for; nothing in their configs says so.
_WITH_SINKS = ("gpt_oss",)


@dataclass
class AttentionCalls:
    """How often attention was called in a forward, with a window, and with a cap on the scores."""

    layers: int = 0
    windowed: int = 0
    capped: int = 0

    def count(self, window: int | None, cap: float | None) -> None:
        """One more call."""
        self.layers += 1
        self.windowed += window is not None
        self.capped += cap is not None

    @staticmethod
    def needed_by(config: Any) -> AttentionCalls:
        """The calls of one forward of a text model with this config."""
        layers = config.num_hidden_layers
        kinds = getattr(config, "layer_types", None)
        if kinds:
            windowed = list(kinds).count(SLIDING)
        else:
            windows = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
            windowed = layers if windows else 0
        return AttentionCalls(layers, windowed, layers if getattr(config, "attn_logit_softcapping", None) else 0)

    def require(self, got: AttentionCalls, model: str) -> None:
        """Compare the needed calls (self) with those of a forward.

        Raises:
            ContractError: some layer did not ask for what the config says.
        """
        if got != self:
            raise ContractError(
                f"{model} called the engine's attention {got.layers} times, {got.windowed} with a window and "
                f"{got.capped} with a soft cap; its config means {self.layers}, {self.windowed} and {self.capped}. "
                "Some layers attend by themselves, across rows or beyond their window."
            )


def unsupported_attention(config: Any) -> list[str]:
    """Properties of a text config that neither engine computes rightly; empty for a supported one."""
    reasons = []
    if odd := sorted(set(getattr(config, "layer_types", None) or ()) - {*FULL, SLIDING}):
        reasons.append(f"it has layers of type {', '.join(odd)}")
    if config.model_type in _WITH_SINKS:
        reasons.append("its attention has sinks")
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("it is an encoder-decoder")
    if getattr(config, "use_bidirectional_attention", None):
        reasons.append(f"use_bidirectional_attention={config.use_bidirectional_attention}: it attends to later tokens")
    for name in ("kv_lora_rank", "attention_chunk_size", "mamba_d_state", "ssm_state_size", "use_alibi", "alibi"):
        if getattr(config, name, None):
            reasons.append(f"{name}={getattr(config, name)}")
    for rope in _rope_types(config):
        if rope in ("dynamic", "longrope"):
            reasons.append(f"its rotary embedding ({rope}) depends on the other rows of a batch")
    return reasons


def _rope_types(config: Any) -> list[str]:
    """Types of rotary embedding: one, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in parameters.values() if isinstance(part, dict)] or [parameters]
    return sorted({str(part.get("rope_type", "default")) for part in parts})
