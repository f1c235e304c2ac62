"""Parts that several engines' options have: quantisation-aware training and routing replay. Neither is in this version."""

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
