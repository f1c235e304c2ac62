"""Everything about a configuration that can be known before Ray starts.

Each problem says what was set, why it cannot work and the nearest value that can; all of them are reported at once.
"""

from __future__ import annotations

import difflib
import importlib
import math
import os
from pathlib import Path
from typing import Any

from rlflow.config.algorithm import AlgoConfig
from rlflow.config.base import omega_conf_to_dataclass
from rlflow.config.data import DataConfig
from rlflow.config.model import HFModelConfig
from rlflow.config.reward import RewardConfig
from rlflow.config.rollout import RolloutConfig
from rlflow.config.trainer import TrainerConfig
from rlflow.config.worker import FSDPActorConfig, RefConfig
from rlflow.utils.errors import ConfigError

ENGINES = {"hf": "embedded"}
TRACKERS = ("console", "file")
DTYPES = ("bfloat16", "float32", "bf16", "fp32")
KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KNOWN_NODES = {
    "actor_rollout_ref",
    "algorithm",
    "data",
    "model_engine",
    "ray_kwargs",
    "reward",
    "trainer",
    "transfer_queue",
}


def need_reference_policy(config: Any) -> bool:
    """A reference policy is needed by KL in the reward or in the loss."""
    return bool(config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss)


def validate_config(config: Any) -> list[str]:
    """Check the composed, resolved configuration.

    Returns:
        Notices: settings that work but deserve a line.

    Raises:
        ConfigError: listing every problem found.
    """
    problems: list[str] = []
    notices: list[str] = []
    typed = _typed_nodes(config, problems)
    if not problems:
        for check in (_check_values, _check_names, _check_files, _check_lengths, _check_batches, _check_sampling):
            check(typed, problems, notices)
    unread = sorted(set(config) - KNOWN_NODES)
    if unread:
        notices.append(f"nothing in this version reads {', '.join(unread)} (your own code may)")
    if config.actor_rollout_ref.hybrid_engine is not True:
        problems.append(
            "actor_rollout_ref.hybrid_engine must stay true: actor and rollout share their devices.\n"
            "    try:    actor_rollout_ref.hybrid_engine=true"
        )
    if problems:
        count = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
        raise ConfigError(f"the configuration has {count}:\n" + "\n".join(f"- {problem}" for problem in problems))
    return notices


class _Typed:
    """The typed nodes of one configuration."""

    actor: FSDPActorConfig
    ref: RefConfig
    rollout: RolloutConfig
    model: HFModelConfig
    data: DataConfig
    reward: RewardConfig
    trainer: TrainerConfig
    algorithm: AlgoConfig
    needs_ref: bool


def _typed_nodes(config: Any, problems: list[str]) -> _Typed:
    from omegaconf import OmegaConf

    typed = _Typed()
    typed.needs_ref = need_reference_policy(config)
    if OmegaConf.is_missing(config.actor_rollout_ref.rollout, "name"):
        problems.append(
            "actor_rollout_ref.rollout.name is not set: no engine would generate.\n"
            f"    try:    actor_rollout_ref.rollout.name=hf (available: {', '.join(sorted(ENGINES))})"
        )
        return typed
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
    for name, (path, kind) in nodes.items():
        try:
            setattr(typed, name, omega_conf_to_dataclass(OmegaConf.select(config, path), kind))
        except ConfigError as error:
            problems.append(f"{path}: {error}")
    return typed


def _choice(key: str, value: str, choices: Any, why: str = "") -> str:
    names = sorted(choices)
    close = difflib.get_close_matches(value, names, n=1)
    return (
        f"{key}={value} {why or 'is unknown'}.\n    try:    {key}={close[0] if close else names[0]} "
        f"(choices: {', '.join(names)})"
    )


def _check_names(c: _Typed, problems: list[str], notices: list[str]) -> None:
    from rlflow.trainer.ppo import core_algos
    from rlflow.utils.import_utils import import_external_libs

    # A user's module may register the very names that are checked next.
    try:
        import_external_libs(c.model.external_lib)
    except (ImportError, OSError, RuntimeError) as error:
        problems.append(
            f"actor_rollout_ref.model.external_lib={c.model.external_lib} cannot be imported: {error}\n"
            "    try:    a module name, or the path of a .py file"
        )
    if c.rollout.name not in ENGINES:
        problems.append(_choice("actor_rollout_ref.rollout.name", c.rollout.name, ENGINES, "is not in this version"))
    if c.algorithm.adv_estimator not in core_algos.ADV_ESTIMATOR_REGISTRY:
        why = "needs a critic, which is not in this version" if c.algorithm.adv_estimator == "gae" else ""
        problems.append(
            _choice("algorithm.adv_estimator", c.algorithm.adv_estimator, core_algos.ADV_ESTIMATOR_REGISTRY, why)
        )
    loss_mode = c.actor.policy_loss.loss_mode
    if loss_mode not in core_algos.POLICY_LOSS_REGISTRY:
        problems.append(
            _choice("actor_rollout_ref.actor.policy_loss.loss_mode", loss_mode, core_algos.POLICY_LOSS_REGISTRY)
        )
    loggers = [c.trainer.logger] if isinstance(c.trainer.logger, str) else list(c.trainer.logger or [])
    if not loggers:
        problems.append(
            "trainer.logger is empty: nothing would be shown or recorded.\n    try:    trainer.logger=[console,file]"
        )
    for logger in loggers:
        if logger not in TRACKERS:
            problems.append(
                f"trainer.logger names {logger}, which is not in this version.\n"
                "    try:    trainer.logger=[console,file]"
            )
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
    if c.algorithm.filter_groups.enable:
        problems.append(
            "algorithm.filter_groups.enable=true is not in this version.\n    try:    "
            "algorithm.filter_groups.enable=false"
        )
    if c.algorithm.use_kl_in_reward and c.actor.use_kl_loss:
        notices.append("both KL switches are on: algorithm.use_kl_in_reward and actor.use_kl_loss")


def _files(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(v) for v in value or []]


def _check_values(c: _Typed, problems: list[str], notices: list[str]) -> None:
    """Single values that no run can use."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    at_least: list[tuple[str, float, float]] = [
        (f"{actor}.ppo_epochs", c.actor.ppo_epochs, 1),
        (f"{actor}.optim.lr", c.actor.optim.lr, 0),
        (f"{actor}.clip_ratio", c.actor.clip_ratio, 0),
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
        ("reward.num_workers", c.reward.num_workers, 1),
        ("reward.processes_per_worker", c.reward.processes_per_worker, 1),
        ("trainer.total_epochs", c.trainer.total_epochs, 1),
    ]
    above_zero: list[tuple[str, float]] = [
        ("reward.timeout_s", c.reward.timeout_s),
        (f"{rollout}.request_timeout_s", c.rollout.request_timeout_s),
        (f"{rollout}.agent.session_timeout_s", c.rollout.agent.session_timeout_s),
        ("trainer.stall_timeout_s", c.trainer.stall_timeout_s),
    ]
    at_least += [(key, value, 1e-9) for key, value in above_zero]
    for key, value, low in at_least:
        if not (math.isfinite(value) and value >= low):
            limit = "more than 0" if low == 1e-9 else f"at least {low:g}"
            problems.append(f"{key}={value} must be {limit}.\n    try:    {key}={max(low, 1):g}")
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
    if c.trainer.critic_warmup > 0:
        problems.append(
            f"trainer.critic_warmup={c.trainer.critic_warmup}: there is no critic in this version, so these steps "
            "would train nothing.\n    try:    trainer.critic_warmup=0"
        )
    chosen: list[tuple[str, str, tuple[str, ...]]] = [
        (f"{actor}.strategy", c.actor.strategy, ("fsdp", "fsdp2")),
        (f"{actor}.fsdp_config.dtype", c.actor.fsdp_config.dtype, DTYPES),
        (f"{rollout}.dtype", c.rollout.dtype, DTYPES),
        (f"{rollout}.load_format", c.rollout.load_format, ("dummy", "auto", "safetensors")),
        (f"{rollout}.checkpoint_engine.backend", c.rollout.checkpoint_engine.backend, ("naive",)),
        (f"{actor}.kl_loss_type", c.actor.kl_loss_type.removesuffix("+"), KL_ESTIMATORS),
        ("algorithm.kl_penalty", c.algorithm.kl_penalty.removesuffix("+"), KL_ESTIMATORS),
        ("algorithm.kl_ctrl.type", c.algorithm.kl_ctrl.type, ("fixed", "adaptive")),
    ]
    problems.extend(_choice(key, value, choices) for key, value, choices in chosen if value not in choices)
    optim = c.actor.optim
    try:
        known = hasattr(importlib.import_module(optim.optimizer_impl), optim.optimizer)
    except ImportError:
        known = False
    if not known:
        problems.append(
            f"{actor}.optim.optimizer={optim.optimizer}: {optim.optimizer_impl} has no such class.\n"
            f"    try:    {actor}.optim.optimizer=AdamW {actor}.optim.optimizer_impl=torch.optim"
        )


def _check_files(c: _Typed, problems: list[str], notices: list[str]) -> None:
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
    if model.startswith(("/", "~", "./", "../")) and not (Path(model).expanduser() / "config.json").is_file():
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


def _check_lengths(c: _Typed, problems: list[str], notices: list[str]) -> None:
    longest = c.rollout.prompt_length + c.rollout.response_length
    budgets: dict[str, tuple[bool, int]] = {
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": (
            c.actor.use_dynamic_bsz,
            c.actor.ppo_max_token_len_per_gpu,
        ),
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": (
            c.rollout.log_prob_use_dynamic_bsz,
            c.rollout.log_prob_max_token_len_per_gpu,
        ),
    }
    if c.needs_ref:
        budgets["actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"] = (
            c.ref.log_prob_use_dynamic_bsz,
            c.ref.log_prob_max_token_len_per_gpu,
        )
    for key, (dynamic, budget) in budgets.items():
        if dynamic and budget < longest:
            problems.append(
                f"{key}={budget} is less than one sequence may have: prompt {c.rollout.prompt_length} + response "
                f"{c.rollout.response_length} = {longest} tokens.\n    try:    {key}={longest}"
            )
    if c.rollout.max_model_len is not None and c.rollout.max_model_len < longest:
        problems.append(
            f"actor_rollout_ref.rollout.max_model_len={c.rollout.max_model_len} is less than "
            f"prompt + response = {longest}.\n"
            f"    try:    actor_rollout_ref.rollout.max_model_len={longest}, or null"
        )


def _split_advice(prompts: int, mini: int, n: int, unit: int) -> str:
    """The nearest mini-batch that divides the batch and splits over the ranks; else the nearest batch that has one."""
    minis = [m for m in range(1, prompts + 1) if prompts % m == 0 and (m * n) % unit == 0]
    if minis:
        best = min(minis, key=lambda m: abs(m - mini))
        return f"actor_rollout_ref.actor.ppo_mini_batch_size={best} ({best * n} rows)"
    step = unit // math.gcd(n, unit)
    batch = max(step, round(prompts / step) * step)
    return f"data.train_batch_size={batch} actor_rollout_ref.actor.ppo_mini_batch_size={step} ({step * n} rows)"


def _check_batches(c: _Typed, problems: list[str], notices: list[str]) -> None:
    ranks = c.trainer.n_gpus_per_node * c.trainer.nnodes
    prompts, n, mini = c.data.train_batch_size, c.rollout.n, c.actor.ppo_mini_batch_size
    micro, dynamic = c.actor.ppo_micro_batch_size_per_gpu, c.actor.use_dynamic_bsz
    counts: dict[str, int | None] = {
        "data.train_batch_size": prompts,
        "actor_rollout_ref.rollout.n": n,
        "actor_rollout_ref.actor.ppo_mini_batch_size": mini,
        "trainer.n_gpus_per_node": ranks,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": micro,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": c.rollout.log_prob_micro_batch_size_per_gpu,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": c.ref.log_prob_micro_batch_size_per_gpu,
        "data.val_batch_size": c.data.val_batch_size,
    }
    too_small = [
        f"{key}={value} must be at least 1.\n    try:    {key}=1"
        for key, value in counts.items()
        if value is not None and value < 1
    ]
    if too_small:
        problems.extend(too_small)
        return
    if not dynamic and micro is None:
        problems.append(
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu is not set and use_dynamic_bsz is false: "
            "Please set at least one.\n    try:    actor_rollout_ref.actor.use_dynamic_bsz=true"
        )
    unit = ranks if dynamic else ranks * (micro or 1)
    rows = mini * n
    why = ""
    if mini > prompts:
        why = f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} prompts is more than data.train_batch_size={prompts}"
    elif prompts % mini:
        why = (
            f"data.train_batch_size={prompts} is not a multiple of ppo_mini_batch_size={mini}: the last optimizer step "
            "of each batch would be mostly padding"
        )
    elif rows % unit:
        why = (
            f"ppo_mini_batch_size={mini} cannot be split: {mini} prompts x rollout.n={n} = {rows} rows, "
            f"but {ranks} ranks"
            + ("" if dynamic else f" x ppo_micro_batch_size_per_gpu={micro}")
            + f" need a multiple of {unit}"
        )
    if why:
        other = "" if dynamic else ", or actor_rollout_ref.actor.use_dynamic_bsz=true"
        problems.append(f"{why}.\n    try:    {_split_advice(prompts, mini, n, unit)}{other}")
    log_prob: dict[str, tuple[bool, int | None]] = {
        "actor_rollout_ref.rollout": (c.rollout.log_prob_use_dynamic_bsz, c.rollout.log_prob_micro_batch_size_per_gpu)
    }
    if c.needs_ref:
        log_prob["actor_rollout_ref.ref"] = (c.ref.log_prob_use_dynamic_bsz, c.ref.log_prob_micro_batch_size_per_gpu)
    for node, (dynamic, micro_rows) in log_prob.items():
        if not dynamic and micro_rows is None:
            problems.append(
                f"{node}.log_prob_micro_batch_size_per_gpu is not set and {node}.log_prob_use_dynamic_bsz is false.\n"
                f"    try:    {node}.log_prob_micro_batch_size_per_gpu={micro or 8}"
            )
    if c.actor.use_dynamic_bsz != c.rollout.log_prob_use_dynamic_bsz:
        problems.append(
            "actor_rollout_ref.actor.use_dynamic_bsz and actor_rollout_ref.rollout.log_prob_use_dynamic_bsz differ.\n"
            "    try:    leave the second unset: it follows the first"
        )


def _check_sampling(c: _Typed, problems: list[str], notices: list[str]) -> None:
    if c.rollout.temperature <= 0:
        problems.append(
            f"actor_rollout_ref.rollout.temperature={c.rollout.temperature}: greedy rollouts have "
            f"degenerate log-probs and no "
            "exploration.\n    try:    actor_rollout_ref.rollout.temperature=1.0"
        )
    if c.rollout.top_p != 1.0 or c.rollout.top_k not in (-1, 0):
        notices.append(
            f"rollout.top_p={c.rollout.top_p}, top_k={c.rollout.top_k}: the engine samples from a "
            f"truncated distribution, the "
            "trainer's log-probs are of the full one, so probability ratios are biased"
        )
    if c.algorithm.adv_estimator == "grpo" and c.rollout.n == 1:
        notices.append("rollout.n=1 with grpo: every group has one session, so the advantage is the raw reward")
    if c.trainer.nnodes > 1 and c.rollout.checkpoint_engine.backend == "naive":
        notices.append("checkpoint_engine.backend=naive: each replica must share a node with the workers that feed it")
