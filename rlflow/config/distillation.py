"""`distillation`: on-policy distillation from teacher models. It is not in this version."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.base import BaseConfig


@dataclass
class DistillationLossConfig(BaseConfig):
    """Which divergence, and how it joins the policy's loss."""

    loss_mode: str = "k3"
    topk: int = 32
    use_task_rewards: bool = True
    distillation_loss_coef: float = 1.0
    loss_max_clamp: float | None = None
    log_prob_min_clamp: float | None = None
    use_policy_gradient: bool = False
    policy_loss_mode: str = "vanilla"
    clip_ratio: float = 0.2
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2


@dataclass
class TeacherInferenceConfig(BaseConfig):
    """The servers of one teacher; `name`, `dtype`, lengths and temperature follow the rollout's."""

    name: str | None = None
    dtype: str = "bfloat16"
    gpu_memory_utilization: float = 0.5
    enforce_eager: bool = True
    cudagraph_capture_sizes: list[int] | None = None
    free_cache_engine: bool = True
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    tensor_model_parallel_size: int = 2
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    max_num_seqs: int = 1024
    load_format: str = "auto"
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    limit_images: int | None = None
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    disable_log_stats: bool = True
    skip_tokenizer_init: bool = True
    prompt_length: int = 512
    response_length: int = 512
    temperature: float = 1.0


@dataclass
class DistillationTeacherModelConfig(BaseConfig):
    """One teacher, for the rows whose `teacher_key` column is `key`."""

    key: str | None = None
    model_path: str | None = None
    num_replicas: int = 0
    inference: TeacherInferenceConfig = field(default_factory=TeacherInferenceConfig)


@dataclass
class DistillationConfig(BaseConfig):
    """Teachers by name, their devices and the loss."""

    enabled: bool = False
    n_gpus_per_node: int = 8
    nnodes: int = 0
    teacher_key: str = "data_source"
    teacher_models: dict[str, DistillationTeacherModelConfig] = field(
        default_factory=lambda: {"teacher_model": DistillationTeacherModelConfig()}
    )
    distillation_loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)
