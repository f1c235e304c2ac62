"""`reward`: who scores a session, with which function, under which deadline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.base import BaseConfig
from rlflow.config.engine_parts import DisaggregationConfig
from rlflow.utils.errors import ConfigError


@dataclass
class CustomFunctionConfig(BaseConfig):
    """The user's scorer: file path (or pkg://), function name, and keyword arguments that override the call's."""

    path: str | None = None
    name: str = "compute_score"
    reward_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class ModuleConfig(BaseConfig):
    """A Python file by path."""

    path: str | None = None
    name: str = "custom_reward_manager"


@dataclass
class RewardManagerConfig(BaseConfig):
    """The reward manager: a registered name, or (source=importlib) the class `name` of `module.path`."""

    source: str = "register"
    name: str = "naive"
    module: ModuleConfig = field(default_factory=ModuleConfig)

    def __post_init__(self) -> None:
        if self.source not in ("register", "importlib"):
            raise ConfigError(f"reward.reward_manager.source={self.source!r} is unknown; use register or importlib")
        if self.source == "importlib" and not self.module.path:
            raise ConfigError("reward.reward_manager.source=importlib needs reward.reward_manager.module.path")


@dataclass
class SandboxFusionConfig(BaseConfig):
    """A service that runs the code of answers. Not in this version."""

    url: str | None = None
    max_concurrent: int = 64
    memory_limit_mb: int = 1024


@dataclass
class RewardModelRolloutConfig(BaseConfig):
    """The servers of a reward model. Lengths are tokens of the reward model's tokenizer.

    `max_model_len` null means `prompt_length + response_length`; a conversation that is longer gets no score.
    `request_timeout_s`: seconds until a score, waiting included.
    """

    name: str = "hf"
    dtype: str = "bfloat16"
    prompt_length: int = 2048
    response_length: int = 2048
    max_model_len: int | None = None
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    tensor_model_parallel_size: int = 2
    free_cache_engine: bool = True
    request_timeout_s: float = 600.0
    engine_kwargs: dict[str, Any] = field(default_factory=lambda: {"hf": {}})
    gpu_memory_utilization: float = 0.5
    enforce_eager: bool = True
    cudagraph_capture_sizes: list[int] | None = None
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    load_format: str = "auto"
    layered_summon: bool = False
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    do_sample: bool = True
    n: int = 1
    ignore_eos: bool = False
    seed: int = 42
    full_determinism: bool = False
    limit_images: int | None = None
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    disable_log_stats: bool = True
    skip_tokenizer_init: bool = False
    scheduling_policy: str = "fcfs"
    multi_stage_wake_up: bool = False
    quantization: str | None = None
    quantization_config_file: str | None = None
    mtp: dict[str, Any] | None = None
    disaggregation: DisaggregationConfig = field(default_factory=DisaggregationConfig)


@dataclass
class RewardModelConfig(BaseConfig):
    """A model that scores. With a pool of its own it scores while sessions run, else between sampling and training."""

    enable: bool = False
    enable_resource_pool: bool = False
    n_gpus_per_node: int = 8
    nnodes: int = 0
    model_path: str | None = None
    rollout: RewardModelRolloutConfig = field(default_factory=RewardModelRolloutConfig)


@dataclass
class RewardConfig(BaseConfig):
    """Who scores. `timeout_s`: seconds one scorer call may take; then its process is killed and the sample masked.

    `load_timeout_s`: seconds the import of the scorer's file may take.
    """

    num_workers: int = 8
    processes_per_worker: int = 2
    timeout_s: float = 30.0
    load_timeout_s: float = 60.0
    custom_reward_function: CustomFunctionConfig = field(default_factory=CustomFunctionConfig)
    reward_manager: RewardManagerConfig = field(default_factory=RewardManagerConfig)
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    sandbox_fusion: SandboxFusionConfig = field(default_factory=SandboxFusionConfig)


def need_reward_model(config: Any) -> bool:
    """A reward model is asked for by `reward.reward_model.enable`."""
    node = (config.get("reward") or {}).get("reward_model") or {}
    return bool(node.get("enable"))


def is_colocated(config: Any) -> bool:
    """Whether a reward model shares the devices of training, and so scores between sampling and training."""
    return need_reward_model(config) and not config.reward.reward_model.enable_resource_pool
