"""Everything about a configuration that can be known before Ray starts.

Each problem says what was set, why it cannot work and the nearest value that can; all of them are reported at once.
"""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from rlflow.config.algorithm import AlgoConfig
from rlflow.config.algorithm_checks import check_algorithm
from rlflow.config.base import omega_conf_to_dataclass
from rlflow.config.batch_checks import check_batches, check_lengths
from rlflow.config.choices import ESTIMATORS, LOSSES
from rlflow.config.critic import FSDPCriticConfig, need_critic
from rlflow.config.critic_checks import check_critic
from rlflow.config.data import DataConfig
from rlflow.config.describe import keys_of
from rlflow.config.determinism_checks import check_determinism
from rlflow.config.engine_checks import check_engine
from rlflow.config.key_check import check_keys
from rlflow.config.lora_checks import check_lora
from rlflow.config.loss_checks import check_losses, imports_torch
from rlflow.config.model import HFModelConfig
from rlflow.config.origin import Origins
from rlflow.config.overrides import OverrideProblem
from rlflow.config.parallel_checks import check_parallel
from rlflow.config.placement_checks import check_reference_place
from rlflow.config.problems import below, is_missing_folder, missing_package, optimizer
from rlflow.config.problems import choice as _choice
from rlflow.config.reward import RewardConfig
from rlflow.config.reward_checks import check_reward_model
from rlflow.config.rollout import RolloutConfig
from rlflow.config.trainer import TrainerConfig
from rlflow.config.worker import FSDPActorConfig, RefConfig
from rlflow.utils.errors import ConfigError
from rlflow.utils.tracker_names import tracker_names, tracker_problem
from rlflow.workers.rollout.capabilities import CAPABILITIES

DTYPES = ("bfloat16", "float32", "bf16", "fp32")
BACKENDS = ("naive", "broadcast", "nccl", "disk")
_USUAL_ENGINE = "vllm"
KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KNOWN_NODES = {
    "actor_rollout_ref",
    "algorithm",
    "critic",
    "custom_reward_function",
    "data",
    "distillation",
    "global_profiler",
    "model_engine",
    "ray_kwargs",
    "reward",
    "reward_model",
    "sandbox_fusion",
    "skip",
    "trainer",
    "transfer_queue",
}


def need_reference_policy(config: Any) -> bool:
    """A reference policy is needed by KL in the reward or in the loss."""
    return bool(config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss)


def validate_config(
    config: Any,
    *further: Check,
    overrides: Sequence[str] | None = None,
    unusable: Sequence[OverrideProblem] = (),
    found: Sequence[str] = (),
) -> list[str]:
    """Check the composed, resolved configuration.

    Args:
        config: the `DictConfig`.
        further: checks of higher layers; each adds to (problems, notices).
        overrides: the command line, to say where a value was set; None: that is left out.
        unusable: what is wrong with overrides that `config` was composed without. Checks that must import torch are
            then left for the next try: an unknown key is answered at once. Keys that these problems name are not
            complained about again.
        found: problems of the steps before.

    Returns:
        Notices: settings that work but deserve a line.

    Raises:
        ConfigError: listing every problem found.
    """
    from omegaconf import OmegaConf

    problems = list(found)
    notices: list[str] = []
    check_keys(config, problems, notices)
    if config.get("model_engine") != "dp":  # the nodes of another engine have other types
        raise ConfigError(_report(problems, overrides, unusable))
    refused = len(problems)
    no_engine = OmegaConf.is_missing(config.actor_rollout_ref.rollout, "name")
    typed = _typed_nodes(config, problems)
    if len(problems) == refused + no_engine:
        own: list[Check] = [_check_values, _check_files, _check_sampling, check_algorithm, check_critic]
        own += [] if no_engine else [check_engine]
        own += [check_lora, check_lengths, check_parallel, check_batches, check_determinism, check_reward_model]
        own += [check_reference_place, _check_names]
        if not (unusable and imports_torch(typed)):
            # Modules of the user are imported first: they register names that the checks behind know.
            own += [_check_registered, check_losses, *further]
        for check in own:
            check(typed, problems, notices)
    _check_untyped(config, problems, notices)
    if problems or unusable:
        raise ConfigError(_report(problems, overrides, unusable))
    return notices


def _check_untyped(config: Any, problems: list[str], notices: list[str]) -> None:
    """Keys that no dataclass describes."""
    unread = sorted(set(config) - KNOWN_NODES)
    if unread:
        notices.append(f"nothing in this version reads {', '.join(unread)} (your own code may)")
    if config.transfer_queue.metrics.enabled:
        problems.extend(missing_package("transfer_queue.metrics.enabled=true", "prometheus_client", "metrics"))
    collective_s = config.actor_rollout_ref.nccl_timeout
    if not (isinstance(collective_s, (int, float)) and collective_s > 0):
        problems.append(
            f"actor_rollout_ref.nccl_timeout={collective_s} must be more than 0 seconds.\n"
            "    try:    actor_rollout_ref.nccl_timeout=600"
        )
    if config.actor_rollout_ref.hybrid_engine is not True:
        problems.append(
            "actor_rollout_ref.hybrid_engine must stay true: actor and rollout share their devices.\n"
            "    try:    actor_rollout_ref.hybrid_engine=true"
        )


def _report(problems: list[str], overrides: Sequence[str] | None, unusable: Sequence[OverrideProblem]) -> str:
    """All problems, each with where its keys were set; those that follow from an unusable override are left out."""
    origins = None if overrides is None else Origins(overrides, keys_of())
    explained = {key for problem in unusable for key in problem.keys}
    follow = [text for text in problems if re.split(r"[=: ]", text, maxsplit=1)[0] not in explained]
    texts = [problem.text for problem in unusable] + [origins.located(text) if origins else text for text in follow]
    count = f"{len(texts)} problems" if len(texts) > 1 else "1 problem"
    return f"the configuration has {count}:\n" + "\n".join(f"- {text}" for text in texts)


class TypedConfig:
    """The typed nodes of one configuration; `critic` is there when it is needed."""

    actor: FSDPActorConfig
    critic: FSDPCriticConfig
    ref: RefConfig
    rollout: RolloutConfig
    model: HFModelConfig
    data: DataConfig
    reward: RewardConfig
    trainer: TrainerConfig
    algorithm: AlgoConfig
    needs_ref: bool
    needs_critic: bool

    @property
    def loads_ref(self) -> bool:
        """Whether there is a reference model; a policy that trains an adapter is its own reference."""
        return self.needs_ref and not self.model.uses_lora


Check = Callable[[TypedConfig, list[str], list[str]], None]


def _typed_nodes(config: Any, problems: list[str]) -> TypedConfig:
    from omegaconf import OmegaConf

    typed = TypedConfig()
    typed.needs_ref = need_reference_policy(config)
    typed.needs_critic = need_critic(config)
    if OmegaConf.is_missing(config.actor_rollout_ref.rollout, "name"):
        problems.append(
            "actor_rollout_ref.rollout.name is not set: no engine would generate.\n"
            f"    try:    actor_rollout_ref.rollout.name=hf (available: {', '.join(sorted(CAPABILITIES))})"
        )
        config = copy.deepcopy(config)  # checked further with the engine that recipes leave out most
        config.actor_rollout_ref.rollout.name = _USUAL_ENGINE
    nodes: dict[str, tuple[str, type]] = {
        "actor": ("actor_rollout_ref.actor", FSDPActorConfig),
        "ref": ("actor_rollout_ref.ref", RefConfig),
        "rollout": ("actor_rollout_ref.rollout", RolloutConfig),
        "model": ("actor_rollout_ref.model", HFModelConfig),
        "data": ("data", DataConfig),
        "reward": ("reward", RewardConfig),
        "trainer": ("trainer", TrainerConfig),
        "algorithm": ("algorithm", AlgoConfig),
    }
    if typed.needs_critic:
        nodes["critic"] = ("critic", FSDPCriticConfig)
    for name, (path, kind) in nodes.items():
        try:
            setattr(typed, name, omega_conf_to_dataclass(OmegaConf.select(config, path), kind))
        except ConfigError as error:
            text = _with_advice(str(error))
            problems.append(text if text.startswith(f"{path}.") else f"{path}: {text}")
    return typed


def _with_advice(text: str) -> str:
    """A sentence of a dataclass, "what is wrong; what to do", in the form of the checks."""
    what, found, advice = text.rpartition("; ")
    return f"{what}.\n    try:    {advice}" if found and "\n" not in text else text


def _check_registered(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    """Names of estimator and loss; torch is only imported where a module of the user's may register further ones."""
    estimators: Collection[str] = ESTIMATORS
    losses: Collection[str] = LOSSES
    if c.model.external_lib or "rlflow.trainer.ppo.core_algos" in sys.modules:
        from rlflow.trainer.ppo import core_algos
        from rlflow.utils.import_utils import import_external_libs

        try:
            import_external_libs(c.model.external_lib)
        except ConfigError as error:
            problems.append(f"actor_rollout_ref.{error}")
        estimators, losses = core_algos.ADV_ESTIMATOR_REGISTRY, core_algos.POLICY_LOSS_REGISTRY
    for key, name, known in (
        ("algorithm.adv_estimator", c.algorithm.adv_estimator, estimators),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", c.actor.policy_loss.loss_mode, losses),
    ):
        if name not in known:
            problems.append(_choice(key, name, known))


def _check_names(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    loggers = tracker_names(c.trainer.logger)
    if not loggers:
        problems.append(
            "trainer.logger is empty: nothing would be shown or recorded.\n    try:    trainer.logger=[console,file]"
        )
    problems.extend(problem for problem in map(tracker_problem, loggers) if problem)
    if c.trainer.v1.trainer_mode != "sync":
        problems.append(
            _choice("trainer.v1.trainer_mode", c.trainer.v1.trainer_mode, ["sync"], "is not in this version")
        )
    if c.trainer.resume_mode not in ("auto", "disable", "resume_path"):
        problems.append(_choice("trainer.resume_mode", c.trainer.resume_mode, ["auto", "disable", "resume_path"]))
    if c.trainer.device not in ("cpu", "cuda"):
        problems.append(_choice("trainer.device", c.trainer.device, ["cpu", "cuda"]))
    if not c.trainer.use_v1:
        problems.append(
            "trainer.use_v1=false asks for the V0 trainer, which is not in this version.\n    "
            "try:    trainer.use_v1=true"
        )
    if c.algorithm.use_kl_in_reward and c.actor.use_kl_loss:
        notices.append("both KL switches are on: algorithm.use_kl_in_reward and actor.use_kl_loss")


def _files(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(v) for v in value or []]


def _check_values(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    """Single values that no run can use."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    at_least: list[tuple[str, float, float]] = [
        (f"{actor}.ppo_epochs", c.actor.ppo_epochs, 1),
        (f"{actor}.optim.lr", c.actor.optim.lr, 0),
        (f"{actor}.entropy_from_logits_chunk_size", c.actor.entropy_from_logits_chunk_size, 1),
        (f"{rollout}.prompt_length", c.rollout.prompt_length, 1),
        (f"{rollout}.response_length", c.rollout.response_length, 1),
        (f"{rollout}.max_num_seqs", c.rollout.max_num_seqs, 1),
        (f"{rollout}.val_kwargs.n", c.rollout.val_kwargs.n, 1),
        (f"{rollout}.val_kwargs.temperature", c.rollout.val_kwargs.temperature, 0),
        (f"{rollout}.agent.num_workers", c.rollout.agent.num_workers, 1),
        (
            f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes",
            c.rollout.checkpoint_engine.update_weights_bucket_megabytes,
            1,
        ),
        (f"{rollout}.nnodes", c.rollout.nnodes, 0),
        (f"{rollout}.n_gpus_per_node", c.rollout.n_gpus_per_node, 1),
        (f"{rollout}.supervisor.max_restarts", c.rollout.supervisor.max_restarts, 0),
        ("reward.num_workers", c.reward.num_workers, 1),
        ("reward.processes_per_worker", c.reward.processes_per_worker, 1),
        ("trainer.total_epochs", c.trainer.total_epochs, 1),
        ("trainer.log_val_generations", c.trainer.log_val_generations, 0),
        ("trainer.trace.trajectories_per_step", c.trainer.trace.trajectories_per_step or 0, 0),
    ]
    above_zero: list[tuple[str, float]] = [
        ("reward.timeout_s", c.reward.timeout_s),
        (f"{rollout}.request_timeout_s", c.rollout.request_timeout_s),
        (f"{rollout}.supervisor.heartbeat_s", c.rollout.supervisor.heartbeat_s),
        (f"{rollout}.supervisor.hang_timeout_s", c.rollout.supervisor.hang_timeout_s),
        (f"{rollout}.supervisor.start_timeout_s", c.rollout.supervisor.start_timeout_s),
        (f"{rollout}.supervisor.ready_timeout_s", c.rollout.supervisor.ready_timeout_s),
        (f"{rollout}.agent.session_timeout_s", c.rollout.agent.session_timeout_s),
        ("reward.load_timeout_s", c.reward.load_timeout_s),
        ("trainer.stall_timeout_s", c.trainer.stall_timeout_s),
        ("trainer.call_timeout_s", c.trainer.call_timeout_s),
    ]
    sync = c.rollout.checkpoint_engine
    above_zero += [(f"{rollout}.checkpoint_engine.{key}", sync[key]) for key in sync if key.endswith("_timeout_s")]
    at_least += [(key, value, 1e-9) for key, value in above_zero]
    for key, value, low in at_least:
        problems.extend(below(key, value, low))
    if not 0 < c.rollout.top_p <= 1:
        problems.append(
            f"{rollout}.top_p={c.rollout.top_p} is no share of probability.\n    try:    {rollout}.top_p=1.0"
        )
    if c.trainer.total_training_steps is not None and c.trainer.total_training_steps < 0:
        problems.append(
            f"trainer.total_training_steps={c.trainer.total_training_steps} must be 0 or more.\n"
            "    try:    trainer.total_training_steps=null (from the epochs)"
        )
    if c.trainer.val_only and not c.trainer.val_before_train:
        problems.append(
            "trainer.val_only=true with val_before_train=false would validate never and train.\n"
            "    try:    trainer.val_before_train=true"
        )
    chosen: list[tuple[str, str, tuple[str, ...]]] = [
        (f"{actor}.strategy", c.actor.strategy, ("fsdp", "fsdp2")),
        (f"{actor}.fsdp_config.dtype", c.actor.fsdp_config.dtype, DTYPES),
        (f"{rollout}.dtype", c.rollout.dtype, DTYPES),
        (f"{actor}.kl_loss_type", c.actor.kl_loss_type.removesuffix("+"), KL_ESTIMATORS),
        ("algorithm.kl_penalty", c.algorithm.kl_penalty.removesuffix("+"), KL_ESTIMATORS),
        ("algorithm.kl_ctrl.type", c.algorithm.kl_ctrl.type, ("fixed", "adaptive")),
        ("trainer.best_mode", c.trainer.best_mode, ("max", "min")),
    ]
    if c.rollout.checkpoint_engine.custom_backend_module is None:
        chosen.append((f"{rollout}.checkpoint_engine.backend", c.rollout.checkpoint_engine.backend, BACKENDS))
    problems.extend(_choice(key, value, choices) for key, value, choices in chosen if value not in choices)
    problems.extend(optimizer(actor, c.actor.optim))


def _check_files(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    for key, value in (("data.train_files", c.data.train_files), ("data.val_files", c.data.val_files)):
        if not _files(value):
            problems.append(f"{key} is empty.\n    try:    {key}=/path/to/file.parquet")
        for name in _files(value):
            path = Path(name).expanduser()
            if not path.is_file():
                beside = sorted(p.name for p in path.parent.glob("*") if p.suffix in (".parquet", ".jsonl"))
                there = (
                    f"that folder has {', '.join(beside[:5])}" if beside else "make one with examples/data_preprocess/"
                )
                problems.append(f"{key}={name}: no such file.\n    try:    {there}")
    model = c.model.path
    if is_missing_folder(model):
        problems.append(
            f"actor_rollout_ref.model.path={model}: no config.json there, so it is not a Hugging Face model folder.\n"
            "    try:    a folder made by save_pretrained, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct"
        )
    reward = c.reward.custom_reward_function.path
    if reward and not reward.startswith("pkg://") and not Path(reward.removeprefix("file://")).expanduser().is_file():
        problems.append(
            f"reward.custom_reward_function.path={reward}: no such file.\n    try:    an absolute "
            f"path, or pkg://package.module"
        )
    if c.trainer.save_freq > 0 and not _can_create(Path(c.trainer.default_local_dir).expanduser()):
        problems.append(
            f"trainer.default_local_dir={c.trainer.default_local_dir} cannot be written, and trainer.save_freq="
            f"{c.trainer.save_freq} asks for checkpoints.\n    try:    a folder of yours, or trainer.save_freq=-1"
        )
    if c.trainer.resume_mode == "resume_path":
        folder = c.trainer.resume_from_path or ""
        if "global_step_" not in folder or not Path(folder).expanduser().is_dir():
            problems.append(
                f"trainer.resume_from_path={folder or 'null'} is no checkpoint folder.\n"
                "    try:    an existing .../global_step_N, or trainer.resume_mode=auto"
            )


def _can_create(folder: Path) -> bool:
    """Whether this process could make the folder (other nodes may differ)."""
    existing = next((p for p in [folder.absolute(), *folder.absolute().parents] if p.exists()), Path("/"))
    # Kernel file systems claim to be writable.
    kernel = existing.parts[1:2] in (("proc",), ("sys",))
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK) and not kernel


def _check_sampling(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    if c.rollout.temperature <= 0:
        problems.append(
            f"actor_rollout_ref.rollout.temperature={c.rollout.temperature}: greedy rollouts have "
            f"degenerate log-probs and no "
            "exploration.\n    try:    actor_rollout_ref.rollout.temperature=1.0"
        )
    if c.trainer.nnodes > 1 and c.rollout.checkpoint_engine.backend == "naive":
        notices.append("checkpoint_engine.backend=naive: each replica must share a node with the workers that feed it")
