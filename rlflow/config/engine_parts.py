"""Parts that several groups of options have. None of these features is in this version."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlflow.config.base import BaseConfig


@dataclass
class QATConfig(BaseConfig):
    """Quantisation-aware training."""

    enable: bool = False
    mode: str = "w4a16"
    group_size: int = 16
    ignore_patterns: list[str] = field(default_factory=lambda: ["lm_head", "embed_tokens", "re:.*mlp.gate$"])
    activation_observer: str | None = "static_minmax"
    quantization_config_path: str | None = None


@dataclass
class RouterReplayConfig(BaseConfig):
    """Replay of the experts' routing: `mode` is disabled, R2 or R3."""

    mode: str = "disabled"
    record_file: str | None = None
    replay_file: str | None = None


@dataclass
class DisaggregationConfig(BaseConfig):
    """Prefill and decode on different servers. Not in this version."""

    enabled: bool = False
    prefill_replicas: int = 1
    decode_replicas: int = 1
    decode_tensor_model_parallel_size: int | None = None
    transfer_backend: str = "nixl"
    bootstrap_port: int | None = None
    ib_device: str | None = None
