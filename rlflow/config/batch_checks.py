"""Checks of sizes: token budgets hold the longest sequence; mini-batches divide the batch and split over the ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rlflow.config.data_rows import count_rows

if TYPE_CHECKING:
    from rlflow.config.checks import TypedConfig

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"


def check_lengths(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    """One sequence must fit into every token budget and into the rollout engine."""
    longest = c.rollout.prompt_length + c.rollout.response_length
    actor_sp = c.actor.fsdp_config.ulysses_sequence_parallel_size
    # key -> (is a budget at all, tokens a rank, ranks that share a row)
    budgets: dict[str, tuple[bool, int, int]] = {
        f"{ACTOR}.ppo_max_token_len_per_gpu": (c.actor.use_dynamic_bsz, c.actor.ppo_max_token_len_per_gpu, actor_sp),
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": (
            c.rollout.log_prob_use_dynamic_bsz,
            c.rollout.log_prob_max_token_len_per_gpu,
            actor_sp,
        ),
    }
    if c.loads_ref:
        budgets[f"{REF}.log_prob_max_token_len_per_gpu"] = (
            c.ref.log_prob_use_dynamic_bsz,
            c.ref.log_prob_max_token_len_per_gpu,
            c.ref.fsdp_config.ulysses_sequence_parallel_size,
        )
    if c.needs_critic:
        critic_sp = c.critic.fsdp.ulysses_sequence_parallel_size
        for name in ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu"):
            budgets[f"critic.{name}"] = (c.critic.use_dynamic_bsz, c.critic[name], critic_sp)
    for key, (dynamic, budget, sp) in budgets.items():
        if dynamic and budget * max(1, sp) < longest:
            shared = f" x {sp} ranks that share a row" if sp > 1 else ""
            problems.append(
                f"{key}={budget}{shared} is less than one sequence may have: prompt {c.rollout.prompt_length} + "
                f"response {c.rollout.response_length} = {longest} tokens.\n"
                f"    try:    {key}={-(-longest // max(1, sp))}"
            )
    if c.rollout.max_model_len is not None and c.rollout.max_model_len < longest:
        problems.append(
            f"{ROLLOUT}.max_model_len={c.rollout.max_model_len} is less than prompt + response = {longest}.\n"
            f"    try:    {ROLLOUT}.max_model_len={longest}, or null"
        )


def _usual(key: str, c: TypedConfig) -> int:
    """What to try for a count: one mini-batch for the batch, else 1."""
    return max(1, c.actor.ppo_mini_batch_size) if key == "data.train_batch_size" else 1


def check_batches(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    """Batch, mini-batches and micro-batches."""
    updated: dict[str, Any] = {ACTOR: c.actor}
    if c.needs_critic:
        updated["critic"] = c.critic
    too_small = [
        f"{key}={value} must be at least 1.\n    try:    {key}={_usual(key, c)}"
        for key, value in _counts(c, updated).items()
        if value is not None and value < 1
    ]
    if too_small:
        problems.extend(too_small)
        return
    for node, config in updated.items():
        if not config.use_dynamic_bsz and config.ppo_micro_batch_size_per_gpu is None:
            problems.append(
                f"{node}.ppo_micro_batch_size_per_gpu is not set and use_dynamic_bsz is false: "
                f"Please set at least one.\n    try:    {node}.use_dynamic_bsz=true"
            )
    _check_data_size(c, problems)
    seen: set[tuple[int, int | None]] = set()
    for node, config in updated.items():
        # The critic follows the actor's sizes: one advice is enough.
        sizes = (config.ppo_mini_batch_size, None if config.use_dynamic_bsz else config.ppo_micro_batch_size_per_gpu)
        if sizes not in seen:
            problems.extend(_check_mini_batch(c, node, config))
        seen.add(sizes)
    _check_log_prob_batches(c, problems)
    if c.trainer.balance_keep_groups and not c.trainer.balance_batch:
        problems.append(
            "trainer.balance_keep_groups=true has no effect while trainer.balance_batch=false leaves the order alone.\n"
            "    try:    trainer.balance_batch=true"
        )


def _check_data_size(c: TypedConfig, problems: list[str]) -> None:
    rows = count_rows(c.data.train_files, c.data.train_max_samples)
    if rows is not None and rows < c.data.train_batch_size and not c.data.custom_cls.path:
        step = c.actor.ppo_mini_batch_size
        advised = max(1, rows // step * step if rows >= step else rows)
        problems.append(
            f"data.train_batch_size={c.data.train_batch_size} prompts a step, and the train files have {rows}.\n"
            f"    try:    data.train_batch_size={advised}"
            + (f" {ACTOR}.ppo_mini_batch_size={advised}" if advised < step else "")
        )


def _counts(c: TypedConfig, updated: dict[str, Any]) -> dict[str, int | None]:
    counts: dict[str, int | None] = {
        "data.train_batch_size": c.data.train_batch_size,
        f"{ROLLOUT}.n": c.rollout.n,
        "trainer.n_gpus_per_node": c.trainer.n_gpus_per_node * c.trainer.nnodes,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": c.rollout.log_prob_micro_batch_size_per_gpu,
        f"{REF}.log_prob_micro_batch_size_per_gpu": c.ref.log_prob_micro_batch_size_per_gpu,
        "data.val_batch_size": c.data.val_batch_size,
    }
    for node, config in updated.items():
        for name in ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "forward_micro_batch_size_per_gpu"):
            counts[f"{node}.{name}"] = config.get(name)
    return counts


def _check_mini_batch(c: TypedConfig, node: str, config: Any) -> list[str]:
    """Mini-batches of the actor or the critic must divide the batch and split into whole micro-batches a rank."""
    engine = config.fsdp_config if node == ACTOR else config.fsdp
    ranks = max(1, c.trainer.n_gpus_per_node * c.trainer.nnodes // max(1, engine.ulysses_sequence_parallel_size))
    prompts, n, mini = c.data.train_batch_size, c.rollout.n, config.ppo_mini_batch_size
    micro, dynamic = config.ppo_micro_batch_size_per_gpu, config.use_dynamic_bsz
    unit = ranks if dynamic else ranks * (micro or 1)
    rows = mini * n
    why = ""
    if mini > prompts:
        why = f"{node}.ppo_mini_batch_size={mini} prompts is more than data.train_batch_size={prompts}"
    elif prompts % mini:
        why = (
            f"data.train_batch_size={prompts} is not a multiple of {node}.ppo_mini_batch_size={mini}: the last "
            "optimizer step of each batch would be mostly padding"
        )
    elif rows % unit:
        why = (
            f"{node}.ppo_mini_batch_size={mini} cannot be split: {mini} prompts x rollout.n={n} = {rows} rows, "
            f"but {ranks} ranks"
            + ("" if dynamic else f" x ppo_micro_batch_size_per_gpu={micro}")
            + f" need a multiple of {unit}"
        )
    if not why:
        return []
    other = "" if dynamic else f", or {node}.use_dynamic_bsz=true"
    return [f"{why}.\n    try:    {_split_advice(node, prompts, mini, n, unit)}{other}"]


def _split_advice(node: str, prompts: int, mini: int, n: int, unit: int) -> str:
    """The nearest mini-batch that divides the batch and splits over the ranks; else the nearest batch that has one."""
    minis = [m for m in range(1, prompts + 1) if prompts % m == 0 and (m * n) % unit == 0]
    if minis:
        best = min(minis, key=lambda m: abs(m - mini))
        return f"{node}.ppo_mini_batch_size={best} ({best * n} rows)"
    step = unit // math.gcd(n, unit)
    batch = max(step, round(prompts / step) * step)
    return f"data.train_batch_size={batch} {node}.ppo_mini_batch_size={step} ({step * n} rows)"


def _check_log_prob_batches(c: TypedConfig, problems: list[str]) -> None:
    sizes: dict[str, tuple[bool, int | None]] = {
        ROLLOUT: (c.rollout.log_prob_use_dynamic_bsz, c.rollout.log_prob_micro_batch_size_per_gpu)
    }
    if c.loads_ref:
        sizes[REF] = (c.ref.log_prob_use_dynamic_bsz, c.ref.log_prob_micro_batch_size_per_gpu)
    for node, (dynamic, rows) in sizes.items():
        if not dynamic and rows is None:
            problems.append(
                f"{node}.log_prob_micro_batch_size_per_gpu is not set and {node}.log_prob_use_dynamic_bsz is false.\n"
                f"    try:    {node}.log_prob_micro_batch_size_per_gpu={c.actor.ppo_micro_batch_size_per_gpu or 8}"
            )
    if c.actor.use_dynamic_bsz != c.rollout.log_prob_use_dynamic_bsz:
        problems.append(
            f"{ACTOR}.use_dynamic_bsz and {ROLLOUT}.log_prob_use_dynamic_bsz differ.\n"
            "    try:    leave the second unset: it follows the first"
        )
