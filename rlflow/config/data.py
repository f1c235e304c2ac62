"""`data`: files, lengths and batch sizes. Batch sizes count prompts, lengths count tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.base import BaseConfig


@dataclass
class CustomClassConfig(BaseConfig):
    """A user's class by file path (or pkg://) and name."""

    path: str | None = None
    name: str | None = None


@dataclass
class DataConfig(BaseConfig):
    """The prompt data set and how prompts are fed."""

    train_files: Any = "~/data/rlhf/gsm8k/train.parquet"
    val_files: Any = "~/data/rlhf/gsm8k/test.parquet"
    train_max_samples: int = -1
    val_max_samples: int = -1
    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    max_prompt_length: int = 512
    max_response_length: int = 512
    train_batch_size: int = 1024
    val_batch_size: int | None = None
    shuffle: bool = True
    validation_shuffle: bool = False
    seed: int | None = None
    filter_overlong_prompts: bool = False
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)
