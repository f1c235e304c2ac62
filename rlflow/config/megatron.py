"""Options of the Megatron engine. They are known, so that recipes can be read; the engine is not in this version."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.base import BaseConfig
from rlflow.config.critic import CriticConfig
from rlflow.config.engine_parts import QATConfig, RouterReplayConfig
from rlflow.config.worker import ActorConfig, BaseRefConfig, CheckpointConfig


def _qat() -> QATConfig:
    return QATConfig(ignore_patterns=["lm_head", "*mlp.gate"], activation_observer=None)


def _transformer_options() -> dict[str, Any]:
    return {
        "recompute_granularity": None,
        "recompute_modules": ["core_attn"],
        "recompute_method": None,
        "recompute_num_layers": None,
        "attention_backend": "flash",
    }


@dataclass
class McoreOptimizerConfig(BaseConfig):
    """Optimizer and schedule. Steps count optimizer steps."""

    optimizer: str = "adam"
    lr: float = 1e-3
    lr_warmup_init: float = 0.0
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    total_training_steps: int = -1
    lr_decay_steps: int | None = None
    lr_decay_style: str = "constant"
    min_lr: float = 0.0
    weight_decay: float = 0.01
    weight_decay_incr_style: str = "constant"
    lr_wsd_decay_style: str = "exponential"
    lr_wsd_decay_steps: int | None = None
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    clip_grad: float = 1.0
    use_checkpoint_opt_param_scheduler: bool = False
    use_precision_aware_optimizer: bool = False
    main_grads_dtype: str = "fp32"
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    use_layer_wise_distributed_optimizer: bool = False
    muon_momentum: float = 0.95
    muon_nesterov: bool = False
    muon_split_qkv: bool = True
    muon_scale_mode: str = "spectral"
    muon_coefficient_type: str = "quintic"
    muon_num_ns_steps: int = 5
    muon_tp_mode: str = "blockwise"
    muon_fp32_matmul_prec: str = "medium"
    muon_extra_scale_factor: float = 1.0
    muon_scalar_optimizer: str = "adam"
    muon_match_adamw_update_rms: bool = False
    override_optimizer_config: dict[str, Any] | None = field(default_factory=dict)


@dataclass
class McoreEngineConfig(BaseConfig):
    """How a model is split over ranks; `*_parallel_size` count ranks."""

    param_offload: bool = False
    grad_offload: bool = False
    optimizer_offload: bool = False
    tensor_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    dynamic_context_parallel: bool = False
    max_seqlen_per_dp_cp_rank: int | None = None
    sequence_parallel: bool = True
    use_distributed_optimizer: bool = True
    pad_bshd_to_minibatch_max: bool = True
    use_dist_checkpointing: bool = False
    dist_checkpointing_path: str | None = None
    dist_checkpointing_prefix: str = ""
    dist_ckpt_optim_fully_reshardable: bool = False
    distrib_optim_fully_reshardable_mem_efficient: bool = False
    seed: int = 42
    override_ddp_config: dict[str, Any] = field(default_factory=dict)
    override_transformer_config: dict[str, Any] = field(default_factory=_transformer_options)
    override_mcore_model_config: dict[str, Any] = field(default_factory=dict)
    use_mbridge: bool = True
    vanilla_mbridge: bool = False
    use_remove_padding: bool = True
    forward_only: bool = False
    dtype: str = "bfloat16"
    use_megatron_fsdp: bool = False
    entropy_from_logits_with_chunking: bool = False
    entropy_from_logits_chunk_size: int = 2048
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)
    qat: QATConfig = field(default_factory=_qat)


@dataclass
class McoreCheckpointConfig(CheckpointConfig):
    """`mbridge_config`: arguments of the bridge's `save_weights`."""

    mbridge_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class McoreActorConfig(ActorConfig):
    """An actor on the Megatron engine."""

    strategy: str = "megatron"
    entropy_from_logits_with_chunking: bool = False
    entropy_from_logits_chunk_size: int = 2048
    checkpoint: McoreCheckpointConfig = field(default_factory=McoreCheckpointConfig)
    optim: McoreOptimizerConfig = field(default_factory=lambda: McoreOptimizerConfig(lr=1e-6))
    megatron: McoreEngineConfig = field(default_factory=McoreEngineConfig)


@dataclass
class McoreRefConfig(BaseRefConfig):
    """A reference policy on the Megatron engine."""

    strategy: str = "megatron"
    entropy_from_logits_with_chunking: bool = False
    entropy_from_logits_chunk_size: int = 2048
    megatron: McoreEngineConfig = field(default_factory=lambda: McoreEngineConfig(forward_only=True))


@dataclass
class McoreCriticConfig(CriticConfig):
    """A critic on the Megatron engine. `nccl_timeout`: seconds."""

    strategy: str = "megatron"
    nccl_timeout: int = 600
    checkpoint: McoreCheckpointConfig = field(default_factory=McoreCheckpointConfig)
    optim: McoreOptimizerConfig = field(default_factory=lambda: McoreOptimizerConfig(lr=1e-5))
    megatron: McoreEngineConfig = field(default_factory=McoreEngineConfig)
