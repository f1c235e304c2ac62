"""`actor_rollout_ref.model`: which model, and how its graph is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.base import BaseConfig
from rlflow.utils.errors import ConfigError


@dataclass
class LoraOptions(BaseConfig):
    """`model.lora`: `merge` is what becomes of an adapter on its way to the rollout; the rest is Megatron's."""

    merge: bool = False
    type: str = "lora"
    rank: int = 0
    alpha: int = 32
    dropout: float = 0.0
    dropout_position: str = "pre"
    target_modules: list[str] = field(default_factory=lambda: ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
    exclude_modules: list[str] = field(default_factory=list)
    lora_A_init_method: str = "xavier"
    lora_B_init_method: str = "zero"
    a2a_experimental: bool = False
    dtype: str | None = None
    adapter_path: str | None = None
    freeze_vision_model: bool = True
    freeze_vision_projection: bool = True
    freeze_language_model: bool = True


@dataclass
class FusedKernelOptions(BaseConfig):
    """`model.fused_kernel_options`: which kernel; without effect."""

    impl_backend: str = "torch"


@dataclass
class TiledMLPConfig(BaseConfig):
    """`model.tiled_mlp`: MLPs in pieces of rows. Not in this version."""

    enabled: bool = False
    num_shards: int = 4


@dataclass
class MtpConfig(BaseConfig):
    """`model.mtp`: multi-token prediction. Not in this version."""

    enable: bool = False
    enable_train: bool = False
    enable_rollout: bool = False
    detach_encoder: bool = False
    mtp_loss_scaling_factor: float = 0.1
    speculative_algorithm: str = "EAGLE"
    speculative_num_steps: int = 3
    speculative_eagle_topk: int = 1
    speculative_num_draft_tokens: int = 4
    method: str = "mtp"
    num_speculative_tokens: int = 1


@dataclass
class HFModelConfig(BaseConfig):
    """A Hugging Face causal LM.

    The dataclass only names files; loading is done by the process that needs the object (see `tokenizer_source`).
    """

    path: str = "~/models/deepseek-llm-7b-chat"
    hf_config_path: str | None = None
    tokenizer_path: str | None = None
    use_shm: bool = False
    trust_remote_code: bool = False
    custom_chat_template: str | None = None
    external_lib: Any | None = None
    override_config: dict[str, Any] = field(default_factory=dict)
    enable_gradient_checkpointing: bool = True
    enable_activation_offload: bool = False
    use_remove_padding: bool = True
    use_fused_kernels: bool = False
    fused_kernel_options: FusedKernelOptions = field(default_factory=FusedKernelOptions)
    use_liger: bool = False
    tiled_mlp: TiledMLPConfig = field(default_factory=TiledMLPConfig)
    lora_rank: int = 0
    lora_alpha: int = 16
    target_modules: Any = "all-linear"
    exclude_modules: Any = None
    lora_adapter_path: str | None = None
    lora: LoraOptions = field(default_factory=LoraOptions)
    mtp: MtpConfig = field(default_factory=MtpConfig)

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
