"""`actor_rollout_ref.rollout`: sampling, the serving engine, agent loops and weight sync."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.base import BaseConfig
from rlflow.config.engine_parts import DisaggregationConfig, QATConfig
from rlflow.config.model import MtpConfig
from rlflow.config.profiler import RolloutProfilerConfig
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
class CustomAsyncServerConfig(BaseConfig):
    """A server class of the user's. Not in this version."""

    path: str | None = None
    name: str | None = None


@dataclass
class MultiTurnConfig(BaseConfig):
    """Conversations of several turns with tools. Not in this version."""

    enable: bool = False
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    tool_config_path: str | None = None
    function_tool_path: str | None = None
    max_parallel_calls: int = 1
    max_tool_response_length: int = 256
    tool_response_truncate_side: str = "middle"
    use_inference_chat_template: bool = False
    tokenization_sanity_check_mode: str = "strict"
    format: str = "hermes"
    num_repeat_rollouts: int | None = None


@dataclass
class TraceConfig(BaseConfig):
    """Traces of rollouts in a tracing service. Not in this version; see `trainer.trace`."""

    project_name: str | None = "rlflow_examples"
    experiment_name: str | None = "gsm8k"
    backend: str | None = None
    token2text: bool = False
    max_samples_per_step_per_worker: int | None = None


@dataclass
class PrometheusConfig(BaseConfig):
    """Metrics of the engines for Prometheus. Not in this version."""

    enable: bool = False
    port: int = 9090
    file: str = "/tmp/ray/session_latest/metrics/prometheus/prometheus.yml"  # noqa: S108 - a place of Ray's
    served_model_name: str | None = "~/models/deepseek-llm-7b-chat"


@dataclass
class AgentLoopConfig(BaseConfig):
    """Agent-loop workers. `session_timeout_s`: seconds one session may take before it counts as failed."""

    num_workers: int = 8
    default_agent_loop: str = "single_turn_agent"
    agent_loop_config_path: str | None = None
    custom_async_server: CustomAsyncServerConfig = field(default_factory=CustomAsyncServerConfig)
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


def _engine_kwargs() -> dict[str, Any]:
    return {"hf": {}, "vllm": {}, "sglang": {}, "trtllm": {}}


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
    do_sample: bool = True
    repetition_penalty: float = 1.0
    n: int = 1
    seed: int = 42
    full_determinism: bool = False
    prompt_length: int = 512
    response_length: int = 512
    over_sample_rate: float = 0.0
    dtype: str = "bfloat16"
    gpu_memory_utilization: float = 0.5
    ignore_eos: bool = False
    enforce_eager: bool = False
    cudagraph_capture_sizes: list[int] | None = None
    free_cache_engine: bool = True
    tensor_model_parallel_size: int = 2
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
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
    layered_summon: bool = False
    log_prob_micro_batch_size: int | None = None
    log_prob_micro_batch_size_per_gpu: int | None = None
    log_prob_use_dynamic_bsz: bool = False
    log_prob_max_token_len_per_gpu: int = 16384
    multi_stage_wake_up: bool = False
    calculate_log_probs: bool = True
    request_timeout_s: float = 600.0
    val_kwargs: SamplingConfig = field(default_factory=SamplingConfig)
    agent: AgentLoopConfig = field(default_factory=AgentLoopConfig)
    checkpoint_engine: CheckpointEngineConfig = field(default_factory=CheckpointEngineConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    checkpoint_manager_class: str | None = None
    engine_kwargs: dict[str, Any] = field(default_factory=_engine_kwargs)
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    enable_rollout_routing_replay: bool = False
    moe_load_balance_metrics_interval: int = 0
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)
    quantization: str | None = None
    quantization_config_file: str | None = None
    mtp: MtpConfig | None = field(default_factory=MtpConfig)
    qat: QATConfig | None = field(default_factory=QATConfig)
    disaggregation: DisaggregationConfig = field(default_factory=DisaggregationConfig)
    profiler: RolloutProfilerConfig = field(default_factory=RolloutProfilerConfig)

    def __post_init__(self) -> None:
        if self.mode != "async":
            raise ConfigError(
                f"rollout.mode={self.mode!r} does not exist any more: every engine is served by a process of its own.\n"
                "    try:    actor_rollout_ref.rollout.mode=async"
            )
