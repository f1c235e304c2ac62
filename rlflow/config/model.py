"""`actor_rollout_ref.model`: which model, and how its graph is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.base import BaseConfig
from rlflow.utils.errors import ConfigError


@dataclass
class LoraOptions(BaseConfig):
    """`model.lora`: what becomes of an adapter on its way to the rollout."""

    merge: bool = False


@dataclass
class HFModelConfig(BaseConfig):
    """A Hugging Face causal LM.

    The dataclass only names files; loading is done by the process that needs the object (see `tokenizer_source`).
    """

    path: str = "~/models/deepseek-llm-7b-chat"
    hf_config_path: str | None = None
    tokenizer_path: str | None = None
    trust_remote_code: bool = False
    custom_chat_template: str | None = None
    external_lib: Any | None = None
    override_config: dict[str, Any] = field(default_factory=dict)
    enable_gradient_checkpointing: bool = True
    use_remove_padding: bool = True
    use_fused_kernels: bool = False
    lora_rank: int = 0
    lora_alpha: int = 16
    target_modules: Any = "all-linear"
    exclude_modules: Any = None
    lora_adapter_path: str | None = None
    lora: LoraOptions = field(default_factory=LoraOptions)

    def __post_init__(self) -> None:
        if self.lora_rank < 0:
            raise ConfigError(f"model.lora_rank={self.lora_rank} is no rank; 0 trains all weights, 8 to 64 are usual")
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            names = [value] if isinstance(value, str) else value
            if name == "exclude_modules" and value is None:
                continue
            if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names) or not names:
                raise ConfigError(
                    f"model.{name}={value!r} names no modules; set it to all-linear, a pattern, or a list such as "
                    "[q_proj,v_proj]"
                )

    @property
    def uses_lora(self) -> bool:
        """Whether an adapter is trained instead of the weights."""
        return self.lora_rank > 0 or bool(self.lora_adapter_path)

    @property
    def tokenizer_source(self) -> str:
        """Folder or hub id of the tokenizer."""
        return self.tokenizer_path or self.path

    @property
    def config_source(self) -> str:
        """Folder or hub id of the model's config."""
        return self.hf_config_path or self.path
