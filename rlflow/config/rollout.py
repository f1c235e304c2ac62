"""`actor_rollout_ref.rollout`: sampling, the serving engine, agent loops and weight sync."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.base import BaseConfig
from rlflow.utils.errors import ConfigError

CANARIES = ("auto", "always", "never")


@dataclass
class SamplingConfig(BaseConfig):
    """Sampling of validation; `do_sample=false` means greedy whatever the temperature."""

    top_k: int = -1
    top_p: float = 1.0
    temperature: float = 0.0
    n: int = 1
    do_sample: bool = False


@dataclass
class AgentLoopConfig(BaseConfig):
    """Agent-loop workers. `session_timeout_s`: seconds one session may take before it counts as failed."""

    num_workers: int = 8
    default_agent_loop: str = "single_turn_agent"
    agent_loop_config_path: str | None = None
    agent_loop_manager_class: str | None = None
    session_timeout_s: float = 600.0


@dataclass
class CheckpointEngineConfig(BaseConfig):
    """Weights in memory, actor to rollout; see docs/weight_sync.md. `*_timeout_s`: seconds of a phase of a sync."""

    backend: str = "naive"
    update_weights_bucket_megabytes: int = 2048
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    custom_backend_module: Any = None
    keep_fp32: list[str] = field(default_factory=list)
    canary: str = "auto"
    canary_tolerance: float | None = None
    pause_timeout_s: float = 120.0
    prepare_timeout_s: float = 120.0
    transfer_timeout_s: float = 600.0
    verify_timeout_s: float = 300.0
    commit_timeout_s: float = 60.0
    resume_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.canary not in CANARIES:
            raise ConfigError(f"rollout.checkpoint_engine.canary={self.canary!r} is none of {', '.join(CANARIES)}")


@dataclass
class SupervisorConfig(BaseConfig):
    """Who watches the replicas; seconds. `max_restarts` counts each replica by itself."""

    enable: bool = True
    heartbeat_s: float = 5.0
    hang_timeout_s: float = 30.0
    start_timeout_s: float = 600.0
    ready_timeout_s: float = 120.0
    max_restarts: int = 3


@dataclass
class RolloutConfig(BaseConfig):
    """A rollout replica and how it samples. Lengths are tokens; `request_timeout_s` bounds one generate call."""

    name: str = "???"
    mode: str = "async"
    nnodes: int = 0
    n_gpus_per_node: int = 8
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    n: int = 1
    seed: int = 42
    full_determinism: bool = False
    prompt_length: int = 512
    response_length: int = 512
    dtype: str = "bfloat16"
    gpu_memory_utilization: float = 0.5
    ignore_eos: bool = False
    enforce_eager: bool = False
    free_cache_engine: bool = True
    tensor_model_parallel_size: int = 2
    data_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    max_num_seqs: int = 256
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    logprobs_mode: str = "processed_logprobs"
    skip_tokenizer_init: bool = True
    disable_log_stats: bool = True
    load_format: str = "dummy"
    log_prob_micro_batch_size_per_gpu: int | None = None
    log_prob_use_dynamic_bsz: bool = False
    log_prob_max_token_len_per_gpu: int = 16384
    calculate_log_probs: bool = True
    request_timeout_s: float = 600.0
    val_kwargs: SamplingConfig = field(default_factory=SamplingConfig)
    agent: AgentLoopConfig = field(default_factory=AgentLoopConfig)
    checkpoint_engine: CheckpointEngineConfig = field(default_factory=CheckpointEngineConfig)
    checkpoint_manager_class: str | None = None
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    engine_kwargs: dict[str, Any] = field(default_factory=lambda: {"hf": {}, "vllm": {}})

    def __post_init__(self) -> None:
        if self.mode != "async":
            raise ConfigError(
                f"rollout.mode={self.mode!r} does not exist any more: every engine is served by a process of its own.\n"
                "    try:    actor_rollout_ref.rollout.mode=async"
            )
