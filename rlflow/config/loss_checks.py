"""Checks of policy loss and rollout correction: options that no run can use, and options that nobody reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlflow.config import problems as problem
from rlflow.config.choices import CHOICES
from rlflow.config.rollout_correction import RolloutCorrectionConfig
from rlflow.config.worker import PolicyLossConfig

if TYPE_CHECKING:
    from rlflow.config.checks import TypedConfig

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
_DEFAULT = RolloutCorrectionConfig()
# Losses that aggregate in their own way, and how.
OWN_AGGREGATION = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "geo_mean": "one loss a row"}


def imports_torch(c: TypedConfig) -> bool:
    """Whether the checks of names and losses need modules that compute: the user's own, or readers of bounds."""
    correction = c.algorithm.rollout_correction
    bounds = correction is not None and (
        correction.rollout_rs is not None
        or correction.rollout_is_threshold not in (None, _DEFAULT.rollout_is_threshold)
    )
    return bool(c.model.external_lib) or bounds


def check_losses(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    """Everything about policy loss and rollout correction but the name of the loss."""
    _check_numbers(c, problems)
    _check_policy_loss(c, problems, notices)
    if c.algorithm.rollout_correction is not None:
        _check_correction(c.algorithm.rollout_correction, problems, notices)
        _check_bypass(c, c.algorithm.rollout_correction, problems, notices)
    elif c.actor.policy_loss.loss_mode == "bypass_mode" and c.actor.policy_loss.rollout_correction is None:
        problems.append(_bypass_without_correction(f"{CORRECTION}=null"))


def _check_numbers(c: TypedConfig, problems: list[str]) -> None:
    """Numbers of the loss that no run can use; null is not checked: it means the default, or not set."""
    actor, options, own = c.actor, c.actor.policy_loss, f"{ACTOR}.policy_loss"
    # (key, value, a usual value): more than 0, at least 0, finite
    positive: list[tuple[str, float | None, float]] = [
        (f"{ACTOR}.tau_pos", actor.tau_pos, 1.0),
        (f"{ACTOR}.tau_neg", actor.tau_neg, 1.05),
        (f"{ACTOR}.loss_scale_factor", actor.loss_scale_factor, c.rollout.response_length),
        (f"{own}.tau_pos", options.tau_pos, 1.0),
        (f"{own}.tau_neg", options.tau_neg, 1.05),
        (f"{own}.clip_cov_ratio", options.clip_cov_ratio, 0.0002),
        (f"{own}.kl_cov_ratio", options.kl_cov_ratio, 0.0002),
        (f"{own}.dro_beta", options.dro_beta, 0.1),
    ]
    not_negative: list[tuple[str, float | None, float]] = [
        (f"{ACTOR}.clip_ratio", actor.clip_ratio, 0.2),
        (f"{ACTOR}.clip_ratio_low", actor.clip_ratio_low, 0.2),
        (f"{ACTOR}.clip_ratio_high", actor.clip_ratio_high, 0.2),
        (f"{ACTOR}.kl_loss_coef", actor.kl_loss_coef, 0.001),
        (f"{own}.ppo_kl_coef", options.ppo_kl_coef, 0.1),
    ]
    finite: list[tuple[str, float | None, float]] = [
        (f"{ACTOR}.entropy_coeff", actor.entropy_coeff, 0.0),
        (f"{own}.clip_cov_lb", options.clip_cov_lb, 1.0),
        (f"{own}.clip_cov_ub", options.clip_cov_ub, 5.0),
    ]
    for rows, low in ((positive, 1e-9), (not_negative, 0.0), (finite, -math.inf)):
        for key, value, usual in rows:
            problems.extend(problem.outside(key, value, low, math.inf, usual))
    for name in ("clip_cov_ratio", "kl_cov_ratio"):
        value = options[name]
        if value is not None and 1 < value < math.inf:
            problems.append(
                f"{own}.{name}={value} is a share of tokens, so at most 1.\n    try:    {own}.{name}=0.0002"
            )


def _check_policy_loss(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    actor, options = c.actor, c.actor.policy_loss
    mode, own = options.loss_mode, f"{ACTOR}.policy_loss"
    lower, upper = (PolicyLossConfig()[n] if options[n] is None else options[n] for n in ("clip_cov_lb", "clip_cov_ub"))
    if lower >= upper:
        problems.append(
            f"{own}.clip_cov_lb={lower} must be below clip_cov_ub={upper}: no token lies "
            f"between them.\n    try:    {own}.clip_cov_lb=1.0 {own}.clip_cov_ub=5.0"
        )
    if mode == "dro" and options.dro_beta is None:
        problems.append(
            f"{own}.loss_mode=dro needs {own}.dro_beta, which has no default: it is the strength of the pull towards "
            f"the old policy.\n    try:    {own}.dro_beta=0.1"
        )
    if mode in OWN_AGGREGATION and actor.loss_agg_mode != OWN_AGGREGATION[mode]:
        notices.append(
            f"policy_loss.loss_mode={mode} aggregates by its own rule ({OWN_AGGREGATION[mode]}); "
            f"actor.loss_agg_mode={actor.loss_agg_mode} applies to entropy and KL only"
        )


def _check_correction(correction: RolloutCorrectionConfig, problems: list[str], notices: list[str]) -> None:
    if correction.rollout_is is not None:
        levels = CHOICES[f"{CORRECTION}.rollout_is"]
        if correction.rollout_is not in levels:
            problems.append(problem.choice(f"{CORRECTION}.rollout_is", correction.rollout_is, levels))
        if correction.rollout_is_threshold is None:
            problems.append(
                f"{CORRECTION}.rollout_is={correction.rollout_is} needs rollout_is_threshold.\n"
                f"    try:    {CORRECTION}.rollout_is_threshold=2.0"
            )
    else:
        options = ("rollout_is_threshold", "rollout_is_batch_normalize")
        unread = [name for name in options if correction[name] not in (None, _DEFAULT[name])]
        notices.extend(f"rollout_correction.{n}={correction[n]} has no effect: rollout_is is not set" for n in unread)
    if not correction.bypass_mode and correction.loss_type != _DEFAULT.loss_type:
        notices.append(
            f"rollout_correction.loss_type={correction.loss_type} has no effect: only bypass_mode=true has a loss of "
            "its own"
        )
    if correction.rollout_is_threshold not in (None, _DEFAULT.rollout_is_threshold):
        from rlflow.trainer.ppo.core_algos.rollout_correction import parse_is_threshold

        problems.extend(_unreadable("rollout_is_threshold", "2.0", parse_is_threshold, correction.rollout_is_threshold))
    _check_rejection(correction, problems)
    types = CHOICES[f"{CORRECTION}.loss_type"]
    if correction.loss_type not in types:
        problems.append(problem.choice(f"{CORRECTION}.loss_type", correction.loss_type, types))


def _check_rejection(correction: RolloutCorrectionConfig, problems: list[str]) -> None:
    if correction.rollout_rs is None:
        if correction.rollout_rs_threshold is not None:
            problems.append(
                f"{CORRECTION}.rollout_rs_threshold={correction.rollout_rs_threshold} bounds nothing: rollout_rs is "
                f"not set.\n    try:    {CORRECTION}.rollout_rs=token_k1, or rollout_rs_threshold=null"
            )
        return
    from rlflow.trainer.ppo.core_algos.rollout_correction import RS_OPTIONS, parse_rs_options, parse_rs_thresholds

    names = [name.strip() for name in correction.rollout_rs.split(",") if name.strip()]
    unknown = [name for name in names if name not in RS_OPTIONS]
    problems.extend(problem.choice(f"{CORRECTION}.rollout_rs", name, RS_OPTIONS) for name in unknown)
    if not names:
        problems.append(f"{CORRECTION}.rollout_rs is empty.\n    try:    {CORRECTION}.rollout_rs=null")
    if names and not unknown:
        options = parse_rs_options(correction.rollout_rs)
        bounds = ",".join("0.5_2.0" if name.endswith("k1") else "2.0" for name in options)
        example = f"\"'{bounds}'\"" if "," in bounds else bounds
        problems.extend(
            _unreadable(
                "rollout_rs_threshold",
                example,
                lambda threshold: parse_rs_thresholds(options, threshold),
                correction.rollout_rs_threshold,
            )
        )


def _unreadable(key: str, example: str, parse: Callable[[Any], Any], value: Any) -> list[str]:
    """What the parser of a bound says about it, if it says anything."""
    try:
        parse(value)
    except (TypeError, ValueError) as error:
        return [f"{CORRECTION}.{error}.\n    try:    {CORRECTION}.{key}={example}"]
    return []


def _check_bypass(c: TypedConfig, correction: RolloutCorrectionConfig, problems: list[str], notices: list[str]) -> None:
    mode = c.actor.policy_loss.loss_mode
    if not correction.bypass_mode:
        if mode == "bypass_mode":
            problems.append(_bypass_without_correction(f"{CORRECTION}.bypass_mode=false"))
        return
    if not c.rollout.calculate_log_probs:
        problems.append(
            f"{CORRECTION}.bypass_mode=true takes the rollout's log-probs as the old ones, and "
            "actor_rollout_ref.rollout.calculate_log_probs=false does not keep them.\n"
            "    try:    actor_rollout_ref.rollout.calculate_log_probs=true"
        )
    if mode not in ("vanilla", "ppo", "bypass_mode"):
        problems.append(
            f"{ACTOR}.policy_loss.loss_mode={mode} would not be used: {CORRECTION}.bypass_mode=true has a loss of its "
            f"own ({CORRECTION}.loss_type).\n    try:    {CORRECTION}.bypass_mode=false, or "
            f"{ACTOR}.policy_loss.loss_mode=vanilla"
        )
    if correction.rollout_is is not None and correction.loss_type == "ppo_clip":
        notices.append(
            f"rollout_correction.rollout_is={correction.rollout_is} is only measured: in bypass_mode the weights enter "
            "loss_type=reinforce, not ppo_clip"
        )
    if correction.rollout_is_batch_normalize:
        notices.append(
            "rollout_correction.rollout_is_batch_normalize with bypass_mode divides by the mean weight of each "
            "micro-batch: the gradient depends on the micro-batch size"
        )
    if correction.loss_type == "reinforce" and c.actor.ppo_epochs > 1:
        notices.append("rollout_correction.loss_type=reinforce with actor.ppo_epochs > 1: no clip bounds later passes")


def _bypass_without_correction(setting: str) -> str:
    return (
        f"{ACTOR}.policy_loss.loss_mode=bypass_mode with {setting}: the loss would have no correction to apply.\n"
        f"    try:    {CORRECTION}.bypass_mode=true (it selects the loss), or {ACTOR}.policy_loss.loss_mode=vanilla"
    )
