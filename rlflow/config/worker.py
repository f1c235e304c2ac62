"""Actor, reference, engine, optimizer and checkpoint options of a worker."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlflow.config.base import BaseConfig
from rlflow.config.engine_parts import QATConfig, RouterReplayConfig
from rlflow.config.profiler import ProfilerConfig
from rlflow.config.rollout_correction import RolloutCorrectionConfig
from rlflow.utils.errors import ConfigError

LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@dataclass
class PolicyLossConfig(BaseConfig):
    """`actor.policy_loss`: which registered policy loss, and the options of single losses.

    `tau_pos` and `tau_neg` win over those of the actor. Null means the default, where there is one.
    `rollout_correction` is the trainer's to write (bypass mode).
    """

    _mutable_fields: ClassVar[frozenset[str]] = frozenset({"rollout_correction"})

    loss_mode: str = "vanilla"
    clip_cov_ratio: float | None = 0.0002
    clip_cov_lb: float | None = 1.0
    clip_cov_ub: float | None = 5.0
    kl_cov_ratio: float | None = 0.0002
    ppo_kl_coef: float | None = 0.1
    dro_beta: float | None = None
    tau_pos: float | None = None
    tau_neg: float | None = None
    rollout_correction: RolloutCorrectionConfig | None = None


@dataclass
class CheckpointConfig(BaseConfig):
    """What a checkpoint holds: any of "model", "optimizer", "extra" (schedule, RNG), "hf_model" (a HF folder).

    `async_save`: the files are written while training goes on. `strict`: a resume needs every tensor (always so).
    """

    save_contents: list[str] = field(default_factory=lambda: ["model", "optimizer", "extra"])
    save_lora_only: bool = False
    load_contents: list[str] = field(default_factory=lambda: ["model", "optimizer", "extra"])
    async_save: bool = False
    strict: bool = True

    def __post_init__(self) -> None:
        known = {"model", "optimizer", "extra", "hf_model"}
        unknown = sorted((set(self.save_contents) | set(self.load_contents)) - known)
        if unknown:
            raise ConfigError(f"checkpoint contents {unknown} are unknown; choose from {sorted(known)}")


@dataclass
class OptimizerConfig(BaseConfig):
    """Options every optimizer has; `lr_warmup_steps` <= 0 means `lr_warmup_steps_ratio` x total steps.

    `nonfinite_grad`: what an optimizer step whose gradient is not finite does, "skip" or "stop" the run;
    `max_skipped_steps` in a row stop it too (0: any number). `nonfinite_dump_every`: the mini-batch of the first of so
    many such steps is written to the run folder (0: of none), at most `nonfinite_dump_max_mb` MB of it.
    `grad_clip` is an old name of `clip_grad`.
    """

    _mutable_fields: ClassVar[frozenset[str]] = frozenset({"clip_grad", "total_training_steps", "lr_warmup_steps"})

    lr: float = 1e-3
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    total_training_steps: int = -1
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    clip_grad: float | None = 1.0
    grad_clip: float | None = None
    nonfinite_grad: str = "skip"
    max_skipped_steps: int = 20
    nonfinite_dump_every: int = 10
    nonfinite_dump_max_mb: float = 256.0

    def __post_init__(self) -> None:
        if self.grad_clip is not None:
            warnings.warn("optim.grad_clip is an old name; use optim.clip_grad", DeprecationWarning, stacklevel=3)
            self.clip_grad = self.grad_clip
        if not 0.0 <= self.lr_warmup_steps_ratio <= 1.0:
            raise ConfigError(
                f"optim.lr_warmup_steps_ratio={self.lr_warmup_steps_ratio} is no share of the steps; use 0 to 1, or "
                "optim.lr_warmup_steps for a number"
            )
        if self.nonfinite_grad not in ("skip", "stop"):
            raise ConfigError(f"optim.nonfinite_grad={self.nonfinite_grad!r} is unknown; use skip or stop")
        for name in ("max_skipped_steps", "nonfinite_dump_every", "nonfinite_dump_max_mb"):
            if getattr(self, name) < 0:
                raise ConfigError(f"optim.{name}={getattr(self, name)} is negative; 0 switches it off")


@dataclass
class FSDPOptimizerConfig(OptimizerConfig):
    """The optimizer class by name, its extra arguments, and the LR schedule (constant or cosine).

    `warmup_style` is an old name of `lr_scheduler_type`.
    """

    _mutable_fields: ClassVar[frozenset[str]] = OptimizerConfig._mutable_fields | {"lr_scheduler_type"}

    optimizer: str = "AdamW"
    optimizer_impl: str = "torch.optim"
    override_optimizer_config: dict[str, Any] | None = None
    lr_scheduler_type: str = "constant"
    warmup_style: str | None = None
    min_lr_ratio: float | None = 0.0
    num_cycles: float = 0.5
    zero_indexed_step: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_style is not None:
            warnings.warn(
                "optim.warmup_style is an old name; use optim.lr_scheduler_type", DeprecationWarning, stacklevel=3
            )
            self.lr_scheduler_type = self.warmup_style
        if self.lr_scheduler_type not in ("constant", "cosine"):
            raise ConfigError(f"optim.lr_scheduler_type={self.lr_scheduler_type!r} is unknown; use constant or cosine")


@dataclass
class EngineConfig(BaseConfig):
    """Batch sizes and precision that every training engine has; sizes are filled from actor and rollout options."""

    _mutable_fields: ClassVar[frozenset[str]] = frozenset(
        {
            "use_dynamic_bsz",
            "max_token_len_per_gpu",
            "micro_batch_size_per_gpu",
            "infer_max_token_len_per_gpu",
            "infer_micro_batch_size_per_gpu",
            "use_remove_padding",
            "forward_only",
        }
    )

    strategy: str = "fsdp"
    dtype: str = "bfloat16"
    forward_only: bool = False
    seed: int = 42
    use_dynamic_bsz: bool = True
    max_token_len_per_gpu: int | None = None
    micro_batch_size_per_gpu: int | None = None
    infer_max_token_len_per_gpu: int | None = None
    infer_micro_batch_size_per_gpu: int | None = None
    use_remove_padding: bool = True


@dataclass
class FSDPEngineConfig(EngineConfig):
    """Fully sharded data parallel; what each option does: docs/training_engine.md.

    `mixed_precision` {param_dtype, reduce_dtype, buffer_dtype} overrides what `dtype` implies.
    """

    model_dtype: str | None = "fp32"
    fsdp_size: int = -1
    ulysses_sequence_parallel_size: int = 1
    reshard_after_forward: bool = True
    forward_prefetch: bool = False
    defer_fsdp_grad_sync: bool = True
    wrap_policy: dict[str, Any] = field(
        default_factory=lambda: {"disable": False, "transformer_layer_cls_to_wrap": None, "min_num_params": 0}
    )
    mixed_precision: dict[str, Any] | None = None
    full_determinism: bool = False
    use_orig_params: bool = False
    pad_to_length: bool = False
    pad_to_length_bucket: int = 1024
    param_offload: bool = False
    optimizer_offload: bool = False
    grad_offload: bool = False
    offload_policy: bool = False
    entropy_from_logits_with_chunking: bool = True
    entropy_from_logits_chunk_size: int = 2048
    entropy_checkpointing: bool = True
    use_torch_compile: bool = False
    share_prompts: bool | None = None
    qat: QATConfig = field(default_factory=QATConfig)

    def __post_init__(self) -> None:
        if self.strategy not in ("fsdp", "fsdp2"):
            raise ConfigError(
                f"strategy={self.strategy!r} has no engine in this version; set actor_rollout_ref.actor.strategy=fsdp "
                "(both fsdp and fsdp2 shard with torch's fully_shard)"
            )


@dataclass
class ActorConfig(BaseConfig):
    """How the policy is updated.

    Units: `ppo_mini_batch_size` counts prompts (x rollout.n rows), `ppo_micro_batch_size_per_gpu` rows of one forward,
    `ppo_max_token_len_per_gpu` tokens of one forward when `use_dynamic_bsz`.
    """

    _mutable_fields: ClassVar[frozenset[str]] = frozenset({"global_batch_info"})

    strategy: str = "fsdp"
    rollout_n: int = 1
    ppo_mini_batch_size: int = 256
    ppo_micro_batch_size: int | None = None
    ppo_micro_batch_size_per_gpu: int | None = None
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: int = 16384
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    freeze_vision_tower: bool = False
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    entropy_coeff: float = 0.0
    calculate_entropy: bool = False
    fuse_old_log_prob: bool = False
    calculate_sum_pi_squared: bool = False
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    use_prefix_grouper: bool = False
    use_torch_compile: bool = False
    ppo_epochs: int = 1
    shuffle: bool = False
    data_loader_seed: int = 42
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    use_fused_kernels: bool = False
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    qat: QATConfig = field(default_factory=QATConfig)

    def __post_init__(self) -> None:
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            raise ConfigError(
                f"Invalid loss_agg_mode: actor.loss_agg_mode={self.loss_agg_mode!r}; "
                f"choose from {', '.join(LOSS_AGG_MODES)}"
            )
        if not 1.0 < self.clip_ratio_c < math.inf:
            raise ConfigError(
                f"actor.clip_ratio_c={self.clip_ratio_c} must be a number > 1 (dual clip).\n"
                "    try:    actor_rollout_ref.actor.clip_ratio_c=3.0"
            )


@dataclass
class FSDPActorConfig(ActorConfig):
    """An actor trained by the FSDP engine, whose own options say the same where they have the same name."""

    use_remove_padding: bool = True
    grad_clip: float | None = 1.0
    pad_to_length: bool = False
    ulysses_sequence_parallel_size: int = 1
    entropy_from_logits_with_chunking: bool = True
    entropy_from_logits_chunk_size: int = 2048
    entropy_checkpointing: bool = True
    optim: FSDPOptimizerConfig = field(default_factory=lambda: FSDPOptimizerConfig(lr=1e-6))
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)


@dataclass
class BaseRefConfig(BaseConfig):
    """The frozen reference policy, on any engine; its batch sizes default to the actor's.

    It is part of the policy's worker unless `enable_resource_pool` gives it processes and devices of its own.
    """

    strategy: str = "fsdp"
    enable_resource_pool: bool = False
    n_gpus_per_node: int = 8
    nnodes: int = 0
    rollout_n: int = 1
    log_prob_micro_batch_size: int | None = None
    log_prob_micro_batch_size_per_gpu: int | None = None
    log_prob_use_dynamic_bsz: bool = False
    log_prob_max_token_len_per_gpu: int = 16384
    use_torch_compile: bool = False
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)


@dataclass
class RefConfig(BaseRefConfig):
    """A reference policy on the FSDP engine."""

    ulysses_sequence_parallel_size: int = 1
    entropy_from_logits_with_chunking: bool = True
    entropy_from_logits_chunk_size: int = 2048
    entropy_checkpointing: bool = False
    pad_to_length: bool = False
    fsdp_config: FSDPEngineConfig = field(
        default_factory=lambda: FSDPEngineConfig(forward_only=True, entropy_checkpointing=False)
    )


@dataclass
class TrainingWorkerConfig(BaseConfig):
    """All that one `TrainingWorker` needs to build its engine."""

    model_type: str = "language_model"
    model_config: Any = None
    engine_config: Any = None
    optimizer_config: Any = None
    checkpoint_config: Any = None
