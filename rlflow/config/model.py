"""`actor_rollout_ref.model`: which model, and how its graph is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.base import BaseConfig


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

    @property
    def tokenizer_source(self) -> str:
        """Folder or hub id of the tokenizer."""
        return self.tokenizer_path or self.path

    @property
    def config_source(self) -> str:
        """Folder or hub id of the model's config."""
        return self.hf_config_path or self.path
