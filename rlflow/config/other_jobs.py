"""Options of jobs that are not in this version, whose trees can be composed: fine-tuning, scoring of files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.base import BaseConfig
from rlflow.config.data import CustomClassConfig
from rlflow.config.reward import CustomFunctionConfig


@dataclass
class SFTDataConfig(BaseConfig):
    """`data` of sft_trainer. `train_batch_size` counts rows over all processes, lengths count tokens."""

    train_batch_size: int = 256
    micro_batch_size_per_gpu: int = 4
    max_token_len_per_gpu: int = 8192
    use_dynamic_bsz: bool = True
    train_files: Any = "~/data/gsm8k/train.parquet"
    val_files: Any = None
    train_max_samples: int = -1
    val_max_samples: int = -1
    messages_key: str = "messages"
    tools_key: str = "tools"
    enable_thinking_key: str = "enable_thinking"
    enable_thinking_default: bool | None = None
    pad_mode: str = "no_padding"
    max_length: int = 1024
    truncation: str = "error"
    balance_dp_token: bool = False
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)
    use_shm: bool = False
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    num_workers: int = 8
    ignore_input_ids_mismatch: bool = False


@dataclass
class SFTTrainerConfig(BaseConfig):
    """`trainer` of sft_trainer; frequencies count steps, or are after_each_epoch."""

    default_local_dir: str = "checkpoints/gsm8k-sft/test"
    default_hdfs_dir: str | None = None
    project_name: str = "gsm8k-sft"
    experiment_name: str = "test"
    total_epochs: int = 4
    total_training_steps: int | None = None
    logger: Any = field(default_factory=lambda: ["console", "wandb"])
    seed: int = 1
    save_freq: Any = -1
    test_freq: Any = -1
    max_ckpt_to_keep: int | None = None
    balance_batch: bool = True
    resume_mode: str = "auto"
    resume_from_path: str | None = None
    device: str = "cuda"
    nnodes: int = 1
    n_gpus_per_node: int = 1
    profile_interval: list[int] = field(default_factory=lambda: [-1, -1])


@dataclass
class EvaluationDataConfig(BaseConfig):
    """`data` of evaluation: names of columns."""

    path: str = "/tmp/math_Qwen2-7B-Instruct.parquet"  # noqa: S108 - the reference's default
    prompt_key: str = "prompt"
    response_key: str = "responses"
    data_source_key: str = "data_source"
    reward_model_key: str = "reward_model"


@dataclass
class EvaluationFunctionConfig(BaseConfig):
    """`custom_reward_function` of evaluation."""

    path: str | None = None
    name: str = CustomFunctionConfig.name
