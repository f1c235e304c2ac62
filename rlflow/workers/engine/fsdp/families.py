"""Which models the engine computes exactly, and the refusal of the others before weights are loaded.

Nothing here names a family: a model is judged by the properties of its config, and `PackedModel` checks in every
forward that the layers did what the config says. docs/models.md lists the families that are tested.
"""

from __future__ import annotations

from typing import Any

from rlflow.utils.attention_needs import unsupported_attention
from rlflow.utils.errors import ConfigError

# What configs call the probability of dropping activations.
DROPOUTS = (
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "hidden_dropout",
    "resid_pdrop",
    "summary_dropout_prob",
)


def check_model_support(hf_config: Any, model_class: type) -> None:
    """Refuse models that the engine would not compute exactly.

    Args:
        hf_config: the transformers config.
        model_class: the transformers class that will be built from it.

    Raises:
        ConfigError: naming the properties that are not supported.
    """
    text = hf_config.get_text_config()
    reasons = unsupported_attention(text)
    if not getattr(model_class, "_supports_attention_backend", False):
        reasons.insert(0, "its attention cannot be replaced (no attention interface)")
    if text is not hf_config and not getattr(text, "is_encoder_decoder", False):
        reasons.append(f"model_type={hf_config.model_type} reads more than text")
    for name in ("logit_scale", "logits_scaling"):
        if getattr(text, name, None) not in (None, 1, 1.0):
            reasons.append(f"{name}={getattr(text, name)} changes its logits")
    quantised = getattr(hf_config, "quantization_config", None)
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        reasons.append(f"its weights are quantised ({method}), which neither trains nor takes an adapter here")
    if reasons:
        raise ConfigError(
            f"{model_class.__name__} cannot be trained by the FSDP engine of this version: {'; '.join(reasons)}. "
            "docs/models.md lists what works, such as Llama, Qwen2.5, Qwen3, Mistral, Gemma 2 and 3 (text)."
        )


def has_dropout(text_config: Any) -> bool:
    """Whether a text model drops activations while it trains."""
    return any(getattr(text_config, name, 0) for name in DROPOUTS)


def final_softcap(hf_config: Any) -> float | None:
    """The bound of a causal LM's logits, c in c * tanh(logits / c); None for a model without one."""
    value = getattr(hf_config.get_text_config(), "final_logit_softcapping", None)
    return float(value) if value else None
