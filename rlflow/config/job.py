"""What surrounds a run: `ray_kwargs`, `skip` and the old places of the reward options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.base import BaseConfig


@dataclass
class RayKwargsConfig(BaseConfig):
    """Arguments of `ray.init`, and a file for Ray's timeline."""

    ray_init: dict[str, Any] = field(default_factory=lambda: {"num_cpus": None})
    timeline_json_file: str | None = None


@dataclass
class SkipConfig(BaseConfig):
    """Recording and replay of one kind of rollout; `action` is cache or repeat."""

    enable: bool = False
    dump_dir: str = "~/.rlflow/rollout_dump"
    steps: list[int] = field(default_factory=list)
    action: str = "cache"


@dataclass
class SkipManagerConfig(BaseConfig):
    """`skip`: replay of recorded rollouts. It is not in this version."""

    rollout: SkipConfig = field(default_factory=SkipConfig)
    rollout_tq: SkipConfig = field(default_factory=SkipConfig)
    async_rollout: SkipConfig = field(default_factory=SkipConfig)


@dataclass
class LegacyFunctionConfig(BaseConfig):
    """`custom_reward_function`; null = not given."""

    path: str | None = None
    name: str | None = None


@dataclass
class LegacyRewardRolloutConfig(BaseConfig):
    """`reward_model.rollout`; null = not given."""

    name: Any = None
    dtype: Any = None
    gpu_memory_utilization: Any = None
    enforce_eager: Any = None
    cudagraph_capture_sizes: Any = None
    free_cache_engine: Any = None
    data_parallel_size: Any = None
    expert_parallel_size: Any = None
    tensor_model_parallel_size: Any = None
    max_num_batched_tokens: Any = None
    max_model_len: Any = None
    max_num_seqs: Any = None
    load_format: Any = None
    engine_kwargs: Any = None
    limit_images: Any = None
    enable_chunked_prefill: Any = None
    enable_prefix_caching: Any = None
    disable_log_stats: Any = None
    skip_tokenizer_init: Any = None
    prompt_length: Any = None
    response_length: Any = None


@dataclass
class LegacyModelConfig(BaseConfig):
    """`reward_model.model`; null = not given."""

    path: str | None = None
    external_lib: Any = None
    trust_remote_code: bool | None = None


@dataclass
class LegacyRewardModelConfig(BaseConfig):
    """`reward_model`; null = not given."""

    num_workers: int | None = None
    reward_manager: str | None = None
    enable: bool | None = None
    enable_resource_pool: bool | None = None
    n_gpus_per_node: int | None = None
    nnodes: int | None = None
    reward_loop_source: str | None = None
    reward_loop_module_path: str | None = None
    reward_loop_class_name: str | None = None
    model: LegacyModelConfig = field(default_factory=LegacyModelConfig)
    rollout: LegacyRewardRolloutConfig = field(default_factory=LegacyRewardRolloutConfig)


@dataclass
class LegacySandboxConfig(BaseConfig):
    """`sandbox_fusion`; null = not given."""

    url: str | None = None
    max_concurrent: int | None = None
    memory_limit_mb: int | None = None
