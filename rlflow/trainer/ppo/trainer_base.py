"""The loop of a PPO-style run.

    sample -> [reward] -> balance -> old log-probs -> [reference log-probs] -> [values] -> advantage
           -> [update critic] -> update actor -> weight sync

`PPOTrainer` holds no model and, outside the advantage, no tensors of the batch: a batch is a `KVBatchMeta` (keys and
tags), its fields live in the TransferQueue, and worker groups read and write them by name. The three modes (sync,
colocate_async, separate_async) differ only in the `on_*` hooks.

Invariants
    - Every stage returns the meta of the same rows in the same order.
    - Rollout weights have version k while step k + 1 samples (sync).
    - After a step its rows are gone from the TransferQueue.
    - The checkpoint of step k counts only once everything that step k reports is on the disk: a run that goes on from
      it repeats nothing and leaves nothing out.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import rlflow.transfer_queue as tq
from rlflow.observe.feed import notice
from rlflow.observe.recorder import RunRecorder, StageRecord
from rlflow.observe.tracking import Tracking
from rlflow.single_controller.ray import ResourcePoolManager
from rlflow.trainer.ppo import batching, record, stages
from rlflow.trainer.ppo.background_save import PreparedCheckpoint
from rlflow.trainer.ppo.best import mark_best
from rlflow.trainer.ppo.checkpointing import (
    commit_checkpoint,
    finish_at_end,
    finish_saving,
    load_trainer_checkpoint,
    prepare_checkpoint,
)
from rlflow.trainer.ppo.colocated_rewards import score_batch
from rlflow.trainer.ppo.core_algos import get_kl_controller
from rlflow.trainer.ppo.dumps import DumpWriter
from rlflow.trainer.ppo.feed import PromptFeed
from rlflow.trainer.ppo.field_table import StageFields
from rlflow.trainer.ppo.metric_utils import marked_timer
from rlflow.trainer.ppo.prompt_book import PromptBook
from rlflow.trainer.ppo.replay_buffer import uid_of
from rlflow.trainer.ppo.runtime import Runtime, build_runtime, resource_pools
from rlflow.trainer.ppo.sampler import build_replay_buffer
from rlflow.trainer.ppo.stall import Pulse
from rlflow.trainer.ppo.trajectories import write_trajectories
from rlflow.trainer.ppo.utils import need_critic, need_reference_policy, run_folder
from rlflow.trainer.ppo.validation import validate
from rlflow.transfer_queue import KVBatchMeta
from rlflow.utils.metric import reduce_metrics

Metrics = dict[str, Any]
TrainerType = TypeVar("TrainerType", bound="type[PPOTrainer]")

_TRAINERS: dict[str, type[PPOTrainer]] = {}


def register_trainer(name: str) -> Callable[[TrainerType], TrainerType]:
    """Class decorator: make a trainer selectable by `trainer.v1.trainer_mode`."""

    def decorator(cls: TrainerType) -> TrainerType:
        if not (isinstance(cls, type) and issubclass(cls, PPOTrainer)):
            raise TypeError(f"{cls!r} is not a subclass of PPOTrainer")
        if _TRAINERS.get(name, cls) is not cls:
            raise ValueError(f"trainer {name!r} is already {_TRAINERS[name].__qualname__}")
        _TRAINERS[name] = cls
        return cls

    return decorator


def get_trainer_cls(name: str) -> type[PPOTrainer]:
    """The trainer of that mode; ValueError lists the modes there are."""
    from rlflow.trainer.ppo import trainer_sync  # noqa: F401 - registers itself

    if name not in _TRAINERS:
        raise ValueError(f"no trainer mode {name!r}; there is {', '.join(sorted(_TRAINERS))}")
    return _TRAINERS[name]


class PPOTrainer(ABC):  # noqa: B024
    """Drives one RL run; see the module's picture. `init()` builds the processes, `fit()` trains."""

    runtime: Runtime
    feed: PromptFeed
    replay_buffer: Any
    agent_loop_manager: Any
    logger: Tracking | None = None

    def __init__(self, config: Any) -> None:
        self.config = config
        self.use_reference_policy = need_reference_policy(config)
        self.use_critic = need_critic(config)
        algorithm = config.algorithm
        self.kl_controller = get_kl_controller(algorithm.kl_ctrl) if algorithm.use_kl_in_reward else None
        self.recorder = RunRecorder(run_folder(config))
        self.global_steps = 0
        self.saving: PreparedCheckpoint | None = None  # on its way to the disk
        self.stage_fields: dict[str, StageFields] = {}
        self.prompts = PromptBook(self.recorder)
        self._pulse = Pulse()
        self.on_progress: Callable[[int, int], None] | None = None

    # ----- set-up -------------------------------------------------------------------------------------------------

    def init(self) -> None:
        """Build data, processes and servers, resume from a checkpoint, give the servers their first weights."""
        self.feed = PromptFeed(self.config)
        self.replay_buffer = build_replay_buffer(self)
        self.runtime = build_runtime(self.config, self.feed.total_training_steps, self._init_resource_pool_mgr())
        self.dumps = DumpWriter(self.runtime.tokenizer)
        fuses = bool(self.config.actor_rollout_ref.actor.fuse_old_log_prob)
        self._stages_by_fusion = {fused: record.declared_stages(self, fused) for fused in {False, fuses}}
        self.stage_fields = self._stages_by_fusion[fuses]
        self.runtime.checkpoint_manager.sleep_replicas()
        self.global_steps = load_trainer_checkpoint(self)
        record.open_record(self)
        if self.runtime.supervisor is not None:
            self.runtime.supervisor.on_event = self._replica_event
        self.on_init_end()

    def _replica_event(self, name: str, **facts: Any) -> None:
        """What became of a rollout replica: into the journal, and to the user. Called in the supervisor's thread."""
        self.recorder.event(name, self.global_steps, **facts)
        if name in ("replica_lost", "replica_gone"):
            notice(f"rollout replica {facts['replica']}: {name.removeprefix('replica_')} ({facts['cause']})")

    def _init_resource_pool_mgr(self) -> ResourcePoolManager:
        """Which roles there are and on which devices each lives; a subclass may map them to pools of its own."""
        return resource_pools(self.config)

    def close(self, exit_code: int, reason: str | None = None) -> None:
        """End trackers and journal; a second call does nothing."""
        finish_at_end(self, exit_code)
        # The journal first: it takes no time, and a tracker may wait for its server.
        self.recorder.end(self.global_steps, exit_code, reason)
        if self.logger is not None:
            self.logger.finish(exit_code=exit_code)

    def get_llm_client(self) -> Any:
        """The client agent loops generate with."""
        return self.runtime.server_manager.get_client()

    def get_teacher_client(self) -> Any:
        """Clients of teacher models; this trainer has none."""
        return

    def get_reward_handles(self) -> Any:
        """Reward workers that score sessions while they are produced; None when a colocated model scores them later."""
        return self.runtime.reward_manager.reward_loop_worker_handles

    # ----- what the replay buffer tells and asks --------------------------------------------------------------------

    def refill(self, prompts: int) -> None:
        """Submit more prompts of the current step, in place of dropped ones."""
        self._submit(self.feed.next_train_batch(self.global_steps, prompts))

    def reissue(self, partition: str, uids: list[str]) -> None:
        """Submit prompts once more whose trajectories were lost with a storage unit."""
        for batch in self.prompts.again(self.global_steps, partition, uids):
            self._submit(batch)

    def prompt_ended(self, partition: str, uid: str, tag: dict[str, Any]) -> None:
        """All sessions of a prompt ended."""
        self.prompts.ended(self.global_steps, partition, uid, tag)

    def describe_running(self) -> list[str]:
        """Lines for a stall report; raises when no agent-loop worker is left."""
        return self._pulse.lines(self.agent_loop_manager, self.runtime)

    # ----- hooks of the modes ---------------------------------------------------------------------------------------

    def on_init_end(self) -> None:
        """After set-up and resume, before anything is generated."""

    def on_train_begin(self) -> None:
        """Before the first step."""

    def on_train_end(self) -> None:
        """After the last step."""

    def on_validate_begin(self) -> None:
        """Before a validation."""

    def on_validate_end(self) -> None:
        """After a validation."""

    def on_step_begin(self) -> None:
        """Before a step."""

    @abstractmethod
    def on_step_end(self, metrics: Metrics, timing: dict[str, float]) -> None:
        """After a step (and its checkpoint): where weights reach the rollout servers."""

    def on_sample_begin(self) -> None:
        """Before waiting for trajectories."""

    @abstractmethod
    def on_sample_end(self) -> None:
        """When the batch is complete: where servers make room for training."""

    # ----- the loop -------------------------------------------------------------------------------------------------

    def fit(self, agent_loop_manager: Any) -> None:
        """Train until `total_training_steps`; validation, checkpoints and trackers on the way."""
        self.agent_loop_manager = agent_loop_manager
        trainer = self.config.trainer
        self.logger = Tracking.from_config(self.config, resumed_from=self.global_steps)
        if trainer.val_only or (trainer.val_before_train and self.global_steps == 0):
            with self._stage("testing", {}):
                metrics = self._validate()
            self._log(metrics)
            if trainer.val_only:
                self.dumps.flush()
                return
        elif trainer.val_before_train:
            notice(f"going on from step {self.global_steps}: no validation now (trainer.val_only=true does one)")
        if self.global_steps >= self.feed.total_training_steps:
            notice(f"nothing to train: at step {self.global_steps} of {self.feed.total_training_steps}")
        self.on_train_begin()
        while self.global_steps < self.feed.total_training_steps:
            self.global_steps += 1
            self._fit_step()
        finish_saving(self, wait=True)
        self.on_train_end()
        self.dumps.flush()

    def _fit_step(self) -> None:
        trainer = self.config.trainer
        last = self.global_steps >= self.feed.total_training_steps
        metrics: Metrics = {}
        timing: dict[str, float] = {}
        self.recorder.begin_step()
        pending = None
        with marked_timer("step", timing):
            self.on_step_begin()
            batch = self.step(metrics, timing)
            if trainer.save_freq > 0 and (last or self.global_steps % trainer.save_freq == 0):
                with self._stage("save_checkpoint", timing):
                    pending = prepare_checkpoint(self)
            self.on_step_end(metrics, timing)
        if self.runtime.supervisor is not None:
            metrics.update(self.runtime.supervisor.take_metrics())
        try:
            if trainer.test_freq > 0 and (last or self.global_steps % trainer.test_freq == 0):
                with self._stage("testing", timing):
                    metrics.update(self._validate())
            self._report_step(batch, metrics, timing)
        finally:
            # A failure here loses no training: what was prepared is whole.
            if pending is not None:
                commit_checkpoint(self, pending, metrics)
        if pending is None:
            finish_saving(self, wait=False)
            mark_best(run_folder(self.config), self.global_steps, metrics, saved=False, config=self.config)

    def _report_step(self, batch: KVBatchMeta, metrics: Metrics, timing: dict[str, float]) -> None:
        """Numbers, dumps and journal of a step; after it the step's rows are gone."""
        folder = self.config.trainer.rollout_data_dir
        with marked_timer("dump_rollout_generations", timing):
            if folder:
                self.dumps.write_training(folder, self.global_steps, batch)
            write_trajectories(self, batch)
        stages.compute_step_metrics(self, batch, metrics, timing)
        tq.kv_clear(batch.keys, batching.partition_of(batch))
        uids = list(dict.fromkeys(uid_of(batch.keys[row]) for row in batching.real_rows(batch)))
        self.prompts.trained(self.global_steps, uids, len(batch))
        self._log(metrics)

    def _log(self, metrics: Metrics) -> None:
        assert self.logger is not None
        numbers = reduce_metrics(metrics)
        self.recorder.log(self.global_steps, numbers)
        self.logger.log(numbers, step=self.global_steps)

    @contextmanager
    def _stage(self, name: str, timing: dict[str, float], batch: KVBatchMeta | None = None) -> Iterator[None]:
        """Time a stage and note it in the journal."""
        start = time.time()
        with marked_timer(name, timing):
            yield
        fields = self.stage_fields.get(name, StageFields(name, "", ""))
        after_update = name in ("update_weights", "save_checkpoint", "testing")
        self.recorder.stage(
            self.global_steps,
            StageRecord(
                stage=name,
                start=start,
                end=time.time(),
                rows=None if batch is None else len(batch),
                version=self.global_steps if after_update else self.global_steps - 1,
                reads=[*fields.reads, *fields.optional_reads],
                writes=list(fields.writes),
            ),
        )

    def step(self, metrics: Metrics, timing: dict[str, float]) -> KVBatchMeta:
        """Submit one batch of prompts and train on it."""
        self._submit(self.feed.next_train_batch(self.global_steps))
        batch = self._step_once(metrics, timing, self.config.data.train_batch_size)
        # All that was submitted is behind the frontier now: a prompt that failed or was dropped had its turn.
        self.feed.mark_trained(self.prompts.of_this_step)
        return batch

    def _step_once(self, metrics: Metrics, timing: dict[str, float], prompts: int) -> KVBatchMeta:
        with self._stage("gen", timing):
            self.on_sample_begin()
            batch, sampling = self.replay_buffer.sample(self.global_steps, "train", prompts)
            metrics.update(sampling)
            self.on_sample_end()
        if self.get_reward_handles() is None:
            with self._stage("reward", timing, batch):
                batch = self._compute_reward_colocate(batch)
        batch = self._balance_batch(batch, metrics)
        fused = stages.fuses_old_log_prob(self, batch)
        self.stage_fields = self._stages_by_fusion[fused]
        if not fused:
            with self._stage("old_log_prob", timing, batch):
                batch = self._compute_old_log_prob(batch, metrics)
        if self.use_reference_policy:
            with self._stage("ref", timing, batch):
                batch = self._compute_ref_log_prob(batch, metrics)
        if self.use_critic:
            with self._stage("values", timing, batch):
                batch = self._compute_values(batch, metrics)
        with self._stage("adv", timing, batch):
            batch = self._compute_advantage(batch, metrics)
        if self.use_critic:
            with self._stage("update_critic", timing, batch):
                self._update_critic(batch, metrics)
        if self.updates_actor():
            with self._stage("update_actor", timing, batch):
                self._update_actor(batch, metrics)
        return batch

    def updates_actor(self) -> bool:
        """Whether this step trains the policy, or the critic only."""
        return self.config.trainer.critic_warmup <= self.global_steps

    def _balance_batch(self, batch: KVBatchMeta, metrics: Metrics) -> KVBatchMeta:
        sessions = self.config.actor_rollout_ref.rollout.n
        mini_rows = []
        if self.updates_actor():
            mini_rows.append(self.config.actor_rollout_ref.actor.ppo_mini_batch_size * sessions)
        if self.use_critic:
            mini_rows.append(self.config.critic.ppo_mini_batch_size * sessions)
        multiple = batching.required_multiple(self.runtime.dp_size, self.runtime.ref_dp_size, *mini_rows)
        batch = batching.pad_batch(batch, multiple, self.runtime.eos_token_id, self.global_steps)
        return batching.order_rows(
            batch, self.config.trainer, self.runtime.dp_size, metrics, linear_work=self.runtime.linear_work
        )

    def _compute_reward_colocate(self, batch: KVBatchMeta) -> KVBatchMeta:
        return score_batch(self, batch)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: Metrics) -> KVBatchMeta:
        return stages.compute_old_log_prob(self, batch, metrics)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: Metrics) -> KVBatchMeta:
        return stages.compute_ref_log_prob(self, batch)

    def _compute_values(self, batch: KVBatchMeta, metrics: Metrics) -> KVBatchMeta:
        return stages.compute_values(self, batch)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: Metrics) -> KVBatchMeta:
        return stages.compute_advantage(self, batch, metrics)

    def _update_critic(self, batch: KVBatchMeta, metrics: Metrics) -> None:
        stages.update_critic(self, batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: Metrics) -> None:
        stages.update_actor(self, batch, metrics)

    def _submit(self, batch: Any) -> None:
        """Write the prompts' markers, then hand the prompts to the agent loops (returns after dispatch)."""
        uids = self.feed.uids(batch)
        partition = self.feed.partition(batch)
        marker = {"is_prompt": True, "status": "pending", "global_steps": self.global_steps}
        tq.kv_batch_put(uids, partition, tags=[dict(marker) for _ in uids])
        rollout = self.config.actor_rollout_ref.rollout
        sessions = rollout.n if partition == "train" else rollout.val_kwargs.n
        version = self.global_steps - 1 if partition == "train" else self.global_steps
        self.prompts.issued(self.global_steps, partition, batch, uids, sessions, version)
        self.agent_loop_manager.generate_sequences(batch)

    def _validate(self) -> Metrics:
        self.on_validate_begin()
        try:
            metrics = validate(self)
        finally:
            self.on_validate_end()
        core = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
        self.recorder.event("validated", self.global_steps, metrics=core)
        return metrics
