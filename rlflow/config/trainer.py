"""`trainer`: length of a run, where it runs, what it records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.base import BaseConfig


@dataclass
class CustomSamplerConfig(BaseConfig):
    """A user's replay buffer by path and name."""

    path: str | None = None
    name: str | None = None


@dataclass
class WarmupConfig(BaseConfig):
    """An asynchronous mode: batches of prompts sent out before the first step."""

    num_warmup_batches: int = 1


@dataclass
class SeparateAsyncConfig(WarmupConfig):
    """`parameter_sync_step`: updates between two weight syncs."""

    parameter_sync_step: int = 4


@dataclass
class SamplerConfig(BaseConfig):
    """How finished prompt groups are sampled; the thresholds count steps, the group's own included."""

    max_off_policy_threshold: int = 8
    max_off_policy_strategy: str = "drop"
    sync_refill_failed_groups: bool = False
    custom_sampler: CustomSamplerConfig = field(default_factory=CustomSamplerConfig)
    sampler_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class V1Config(BaseConfig):
    """The trainer mode and the block of each mode."""

    trainer_mode: str = "sync"
    sync: dict[str, Any] = field(default_factory=dict)
    colocate_async: WarmupConfig = field(default_factory=WarmupConfig)
    separate_async: SeparateAsyncConfig = field(default_factory=SeparateAsyncConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)


@dataclass
class TraceConfig(BaseConfig):
    """Token-level records of trajectories in the run folder; `trajectories_per_step` null = all, 0 = none."""

    trajectories_per_step: int | None = 64


@dataclass
class TrainerConfig(BaseConfig):
    """Steps, devices, records.

    `stall_timeout_s`: seconds `sample` waits without any progress before the run ends. `call_timeout_s`: seconds one
    call of a worker group may take on all ranks.
    """

    total_epochs: int = 30
    total_training_steps: int | None = None
    project_name: str = "rlflow_examples"
    experiment_name: str = "gsm8k"
    logger: Any = field(default_factory=lambda: ["console", "wandb"])
    wandb_proxy: str | None = None
    log_val_generations: int = 0
    rollout_data_dir: str | None = None
    validation_data_dir: str | None = None
    trace: TraceConfig = field(default_factory=TraceConfig)
    plots: bool = True
    nnodes: int = 1
    n_gpus_per_node: int = 8
    device: str = "cuda"
    save_freq: int = -1
    test_freq: int = -1
    val_before_train: bool = True
    val_only: bool = False
    balance_batch: bool = True
    balance_keep_groups: bool = False
    critic_warmup: int = 0
    resume_mode: str = "auto"
    resume_from_path: str | None = None
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    max_actor_ckpt_to_keep: int | None = None
    max_critic_ckpt_to_keep: int | None = None
    max_best_ckpt_to_keep: int = 1
    best_metric: str | None = None
    best_mode: str = "max"
    stall_timeout_s: float = 600.0
    call_timeout_s: float = 3600.0
    default_hdfs_dir: str | None = None
    del_local_ckpt_after_load: bool = False
    esi_redundant_time: int = 0
    ray_wait_register_center_timeout: int = 300
    use_v1: bool = True
    v1: V1Config = field(default_factory=V1Config)
