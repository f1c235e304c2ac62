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
class ContinuousTokenConfig(BaseConfig):
    """`data.continuous_token`: token ids of a conversation that is continued. Not in this version."""

    enable: bool = False
    model_family: str = "auto"


@dataclass
class DataConfig(BaseConfig):
    """The prompt data set and how prompts are fed."""

    tokenizer: str | None = None
    use_shm: bool = False
    train_files: Any = "~/data/rlhf/gsm8k/train.parquet"
    val_files: Any = "~/data/rlhf/gsm8k/test.parquet"
    train_max_samples: int = -1
    val_max_samples: int = -1
    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    max_prompt_length: int = 512
    max_response_length: int = 512
    train_batch_size: int = 1024
    gen_batch_size: int | None = None
    val_batch_size: int | None = None
    tool_config_path: str | None = None
    function_tool_path: str | None = None
    return_raw_input_ids: bool = False
    return_raw_chat: bool = True
    return_full_prompt: bool = False
    return_multi_modal_inputs: bool = True
    shuffle: bool = True
    validation_shuffle: bool = False
    seed: int | None = None
    dataloader_num_workers: int = 8
    image_patch_size: int = 14
    filter_overlong_prompts: bool = False
    filter_overlong_prompts_workers: int = 1
    truncation: str = "error"
    image_key: str = "images"
    video_key: str = "videos"
    audio_key: str = "audios"
    trust_remote_code: bool = False
    continuous_token: ContinuousTokenConfig = field(default_factory=ContinuousTokenConfig)
    mm_processor_kwargs: dict[str, Any] = field(default_factory=dict)
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)
