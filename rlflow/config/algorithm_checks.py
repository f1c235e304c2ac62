"""Checks of `algorithm`: what an estimator, the group filter and rollout correction need from the rest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rlflow.config import problems as problem
from rlflow.config.algorithm import FilterGroupsConfig, PFPPOConfig
from rlflow.config.choices import ESTIMATORS

if TYPE_CHECKING:
    from rlflow.config.checks import TypedConfig

OPTIMAL_TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
# Estimators that compare the sessions of a prompt: with one session there is nothing to compare with.
COMPARING = ("grpo", "grpo_vectorized", "gdpo", "opo", "reinforce_plus_plus_baseline", "rloo", "rloo_vectorized")
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"


def check_algorithm(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    """Everything about `algorithm` but its names."""
    _check_numbers(c, problems)
    _check_adaptive_kl(c, problems, notices)
    _check_pf_ppo(c, problems)
    _check_estimator(c, problems, notices)
    _check_filter(c, problems, notices)
    _check_correction(c, problems)
    _check_fusion(c, problems, notices)


def _check_numbers(c: TypedConfig, problems: list[str]) -> None:
    """Single numbers that no run can use."""
    algorithm = c.algorithm
    # (key, value, lowest, highest); 1e-9: more than 0
    ranges: list[tuple[str, float, float, float]] = [
        ("gamma", algorithm.gamma, 0, 1),
        ("lam", algorithm.lam, 0, 1),
        ("kl_ctrl.kl_coef", algorithm.kl_ctrl.kl_coef, 0, math.inf),
        ("kl_ctrl.horizon", algorithm.kl_ctrl.horizon, 1, math.inf),
        ("kl_ctrl.target_kl", algorithm.kl_ctrl.target_kl, 1e-9, math.inf),
        ("filter_groups.max_num_gen_batches", algorithm.filter_groups.max_num_gen_batches, 0, math.inf),
    ]
    for name, value, low, high in ranges:
        problems.extend(problem.outside(f"algorithm.{name}", value, low, high))


def _check_adaptive_kl(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    """A step multiplies the coefficient by 1 ± 0.2 rows / horizon at most, see `AdaptiveKLController`."""
    horizon, rows = c.algorithm.kl_ctrl.horizon, c.data.train_batch_size * c.rollout.n
    if not (c.algorithm.use_kl_in_reward and c.algorithm.kl_ctrl.type == "adaptive") or rows <= horizon:
        return
    text = f"algorithm.kl_ctrl.horizon={horizon} is less than the {rows} rows of a step, which may change kl_coef by "
    change = 0.2 * rows / max(horizon, 1)
    if change < 1:
        notices.append(f"{text}{change:.0%}")
    else:
        problems.append(f"{text}{change:.0%}, to 0 or below.\n    try:    algorithm.kl_ctrl.horizon={10 * rows}")


def _check_pf_ppo(c: TypedConfig, problems: list[str]) -> None:
    default, given = PFPPOConfig(), c.algorithm.pf_ppo
    values = {"use_pf_ppo": (c.algorithm.use_pf_ppo, False)}
    values |= {f"pf_ppo.{name}": (given[name], default[name]) for name in given}
    problems.extend(
        f"algorithm.{name}={str(value).lower()}: PF-PPO (resampling of rows by their scores) is not in this version.\n"
        f"    try:    algorithm.{name}={str(only).lower()}"
        for name, (value, only) in values.items()
        if value != only
    )


def _check_estimator(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    estimator, sessions = c.algorithm.adv_estimator, c.rollout.n
    if estimator == "grpo_passk" and sessions < 2:
        problems.append(
            "algorithm.adv_estimator=grpo_passk compares the two best sessions of a prompt, and rollout.n=1 runs one.\n"
            "    try:    actor_rollout_ref.rollout.n=2, or more"
        )
    if estimator in COMPARING and sessions == 1:
        notices.append(f"rollout.n=1 with {estimator}: every group has one session, which nothing is compared with")
    keys, weights = c.algorithm.gdpo_reward_keys, c.algorithm.gdpo_reward_weights
    if estimator != "gdpo":
        if keys or weights:
            notices.append(f"{estimator} does not read algorithm.gdpo_reward_keys (an estimator of your own may)")
        return
    if not keys:
        problems.append(
            "algorithm.adv_estimator=gdpo normalises several rewards one by one, and algorithm.gdpo_reward_keys names "
            "none.\n    try:    algorithm.gdpo_reward_keys=[acc,format], numbers that your reward function returns"
        )
    elif weights is not None and len(weights) != len(keys):
        problems.append(
            f"algorithm.gdpo_reward_weights has {len(weights)} numbers for {len(keys)} gdpo_reward_keys.\n"
            f"    try:    algorithm.gdpo_reward_weights={[1.0] * len(keys)}"
        )
    elif weights is not None and (not all(map(math.isfinite, weights)) or not any(weights)):
        problems.append(
            f"algorithm.gdpo_reward_weights={weights} must be finite and not all 0: they add up to no advantage.\n"
            f"    try:    algorithm.gdpo_reward_weights={[1.0] * len(keys)}"
        )
    if keys and len(set(keys)) < len(keys):
        problems.append(
            f"algorithm.gdpo_reward_keys=[{','.join(keys)}] names a reward twice.\n"
            f"    try:    algorithm.gdpo_reward_keys=[{','.join(dict.fromkeys(keys))}], with a weight each in "
            "gdpo_reward_weights"
        )
    if c.algorithm.use_kl_in_reward:
        problems.append(
            "algorithm.use_kl_in_reward=true has no effect with gdpo: it reads the rewards by name, not the penalised "
            "score.\n    try:    actor_rollout_ref.actor.use_kl_loss=true algorithm.use_kl_in_reward=false"
        )


def _check_filter(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    groups = c.algorithm.filter_groups
    key = "algorithm.filter_groups"
    if not groups.enable:
        default = FilterGroupsConfig()
        unread = [name for name in groups if groups[name] != default[name]]
        if unread:
            notices.append(f"{key}.{', '.join(unread)} has no effect: {key}.enable=false filters nothing")
        return
    if not groups.metric:
        problems.append(
            f"{key}.enable=true needs {key}.metric: which number must vary within a group.\n"
            f"    try:    {key}.metric=acc (there when the reward function returns a number; else a key of its dict)"
        )
    if groups.max_inflight_gen_batches < 1:
        problems.append(
            f"{key}.max_inflight_gen_batches={groups.max_inflight_gen_batches} must be at least 1.\n"
            f"    try:    {key}.max_inflight_gen_batches=1"
        )
    if groups.max_num_gen_batches == 1:
        notices.append(
            f"{key}.max_num_gen_batches=1: no prompt may replace a dropped group, the first one ends the run"
        )
    if c.rollout.n == 1:
        problems.append(
            f"{key}.enable=true with rollout.n=1: a group of one cannot vary, and is never dropped.\n"
            "    try:    actor_rollout_ref.rollout.n=8"
        )
    if c.trainer.v1.sampler.custom_sampler.path:
        notices.append(f"{key}: your custom sampler gets refill_fn; dropping groups is its own business")


def _check_correction(c: TypedConfig, problems: list[str]) -> None:
    """What rollout correction needs from rollout and estimator; its own options are checked with the losses."""
    correction, key = c.algorithm.rollout_correction, "algorithm.rollout_correction"
    if correction is None:
        return
    if not correction.bypass_mode:
        if (correction.rollout_is or correction.rollout_rs) and not c.rollout.calculate_log_probs:
            problems.append(
                f"{key} compares with the log-probs of the rollout, and {LOG_PROBS}=false leaves them out.\n"
                f"    try:    {LOG_PROBS}=true"
            )
        return
    needs_pass = c.algorithm.adv_estimator in OPTIMAL_TOKEN_BASELINES
    if needs_pass or c.actor.calculate_sum_pi_squared:
        what = f"adv_estimator={c.algorithm.adv_estimator}" if needs_pass else "actor.calculate_sum_pi_squared=true"
        problems.append(
            f"{key}.bypass_mode=true leaves out the log-prob pass, which {what} needs.\n"
            f"    try:    {key}.bypass_mode=false"
        )


def _check_fusion(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    """The update can give the old log-probs when it makes one optimizer step, and when nobody reads them before it."""
    if not c.actor.fuse_old_log_prob:
        return
    if c.algorithm.adv_estimator not in ESTIMATORS:
        notices.append(
            f"actor.fuse_old_log_prob=true: your estimator {c.algorithm.adv_estimator} gets no old_log_probs: they are "
            "only known after it"
        )
    correction = c.algorithm.rollout_correction
    reasons = {
        f"ppo_mini_batch_size={c.actor.ppo_mini_batch_size} of train_batch_size={c.data.train_batch_size} prompts "
        "makes several optimizer steps a batch": c.actor.ppo_mini_batch_size != c.data.train_batch_size,
        f"ppo_epochs={c.actor.ppo_epochs} makes several optimizer steps a batch": c.actor.ppo_epochs != 1,
        "actor.shuffle=true changes the order of the rows": bool(c.actor.shuffle),
        "algorithm.use_kl_in_reward=true reads them for the reward": c.algorithm.use_kl_in_reward,
        f"adv_estimator={c.algorithm.adv_estimator} reads them": c.algorithm.adv_estimator in OPTIMAL_TOKEN_BASELINES,
        "actor.calculate_sum_pi_squared=true needs the pass": c.actor.calculate_sum_pi_squared,
        "algorithm.rollout_correction reads them (rollout_is, rollout_rs) or replaces them (bypass_mode)": correction
        is not None
        and bool(correction.rollout_is or correction.rollout_rs or correction.bypass_mode),
    }
    problems.extend(
        f"actor_rollout_ref.actor.fuse_old_log_prob=true takes the old log-probs from the update, but {reason}.\n"
        "    try:    actor_rollout_ref.actor.fuse_old_log_prob=false"
        for reason, holds in reasons.items()
        if holds
    )
