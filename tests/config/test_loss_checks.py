"""Policy loss and rollout correction: presets, impossible values, values that nobody reads."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlflow.config import AlgoConfig, FSDPActorConfig, RolloutConfig, RolloutCorrectionConfig, omega_conf_to_dataclass
from rlflow.config.checks import TypedConfig, validate_config
from rlflow.config.loss_checks import check_losses
from rlflow.config.overrides import check_overrides, compose_config
from rlflow.trainer.ppo.core_algos.rollout_correction import parse_is_threshold, parse_rs_options, parse_rs_thresholds
from rlflow.utils.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
LOSS, CORRECTION = f"{ACTOR}.policy_loss", "algorithm.rollout_correction"


def found(overrides: list[str]) -> tuple[list[str], list[str]]:
    """(problems, notices) of settings, everything else as it is by default."""
    config = OmegaConf.from_dotlist(["actor_rollout_ref.rollout.name=hf", *overrides])
    typed = TypedConfig()
    typed.actor = omega_conf_to_dataclass(OmegaConf.select(config, "actor_rollout_ref.actor"), FSDPActorConfig)
    typed.rollout = omega_conf_to_dataclass(OmegaConf.select(config, "actor_rollout_ref.rollout"), RolloutConfig)
    typed.algorithm = omega_conf_to_dataclass(OmegaConf.select(config, "algorithm"), AlgoConfig)
    problems: list[str] = []
    notices: list[str] = []
    check_losses(typed, problems, notices)
    return problems, notices


@pytest.mark.parametrize(
    ("override", "part"),
    [
        (f"{LOSS}.loss_mode=dro", f"try:    {LOSS}.dro_beta=0.1"),
        (f"{LOSS}.dro_beta=0", "dro_beta=0.0 must be more than 0"),
        (f"{LOSS}.clip_cov_ratio=0", f"must be more than 0.\n    try:    {LOSS}.clip_cov_ratio=0.0002"),
        (f"{LOSS}.kl_cov_ratio=2", "is a share of tokens"),
        (f"{LOSS}.clip_cov_lb=7", "must be below clip_cov_ub=5.0"),
        (f"{LOSS}.tau_pos=-1", "tau_pos=-1.0 must be more than 0"),
        ("actor_rollout_ref.actor.tau_neg=0", "tau_neg=0.0 must be more than 0"),
        ("actor_rollout_ref.actor.clip_ratio_high=-0.1", "clip_ratio_high=-0.1 must be at least 0"),
        (f"{LOSS}.loss_mode=bypass_mode", f"try:    {CORRECTION}.bypass_mode=true"),
        (f"{CORRECTION}.rollout_is=tokens", "rollout_is=token "),
        (f"{CORRECTION}.rollout_is_threshold=true", "must be a number"),
        (f"{CORRECTION}.rollout_is_threshold=''", "is not a number"),
        (f"{CORRECTION}.rollout_is_threshold=5.0_0.5", "try '0.5_5'"),
        (f"{CORRECTION}.rollout_is_threshold=-1", "more than 0"),
        (f"{CORRECTION}.rollout_rs=token_k4", "rollout_rs=token_k"),
        (f"{CORRECTION}.rollout_rs=''", f"{CORRECTION}.rollout_rs=null"),
        (f"{CORRECTION}.rollout_rs=token_k1", f"try:    {CORRECTION}.rollout_rs_threshold=0.5_2.0"),
        (f"{CORRECTION}.rollout_rs_threshold=2.0", "bounds nothing"),
        (f"{CORRECTION}.loss_type=ppo", "loss_type=ppo_clip"),
        (f"{CORRECTION}.rollout_is_threshold=inf", "must be a finite number, more than 0"),
        (f"{ACTOR}.loss_scale_factor=0", f"must be more than 0.\n    try:    {ACTOR}.loss_scale_factor=512"),
        (f"{ACTOR}.loss_scale_factor=-1", "must be more than 0"),
        (f"{ACTOR}.entropy_coeff=nan", f"must be a finite number.\n    try:    {ACTOR}.entropy_coeff=0"),
        (f"{ACTOR}.kl_loss_coef=nan", f"must be at least 0.\n    try:    {ACTOR}.kl_loss_coef=0.001"),
        (f"{LOSS}.ppo_kl_coef=nan", f"must be at least 0.\n    try:    {LOSS}.ppo_kl_coef=0.1"),
        (f"{LOSS}.clip_cov_ub=nan", "clip_cov_ub=nan must be a finite number"),
        (f"{LOSS}.clip_cov_lb=6", f"{LOSS}.clip_cov_lb=6.0 must be below clip_cov_ub=5.0"),
    ],
)
def test_what_cannot_work_is_refused_with_what_can(override: str, part: str) -> None:
    problems, _ = found([override])
    assert len(problems) == 1 and part in problems[0]


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ([f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=null"], "needs rollout_is_threshold"),
        ([f"{CORRECTION}.bypass_mode=true", f"{LOSS}.loss_mode=gspo"], "loss_mode=gspo would not be used"),
        (
            [f"{CORRECTION}.bypass_mode=true", "actor_rollout_ref.rollout.calculate_log_probs=false"],
            "calculate_log_probs=true",
        ),
        ([f"{CORRECTION}=null", f"{LOSS}.loss_mode=bypass_mode"], "rollout_correction=null"),
        (
            [f"{CORRECTION}.rollout_rs=token_k1,token_k2,seq_max_k2", f"{CORRECTION}.rollout_rs_threshold='1.5,2.0'"],
            "2 bounds for the 3",
        ),
    ],
)
def test_combinations_that_cannot_work(overrides: list[str], part: str) -> None:
    problems, _ = found(overrides)
    assert len(problems) == 1 and part in problems[0]


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ([f"{LOSS}.loss_mode=gspo"], "seq-mean-token-mean"),
        (
            [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=sequence"],
            "rollout_is=sequence is only measured",
        ),
        (
            [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is_batch_normalize=true"],
            "mean weight of each micro-batch",
        ),
        (
            [
                f"{CORRECTION}.bypass_mode=true",
                f"{CORRECTION}.loss_type=reinforce",
                "actor_rollout_ref.actor.ppo_epochs=2",
            ],
            "no clip bounds",
        ),
    ],
)
def test_settings_that_work_but_surprise_get_a_line(overrides: list[str], part: str) -> None:
    problems, notices = found(overrides)
    assert problems == [] and any(part in notice for notice in notices)


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{CORRECTION}=null"],
        [f"{CORRECTION}.rollout_is_threshold=null"],
        [
            f"{LOSS}.{name}=null"
            for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
        ],
        [f"{ACTOR}.entropy_coeff=-0.01", f"{ACTOR}.loss_scale_factor=null"],
        [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_5.0"],
        [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type=reinforce", f"{CORRECTION}.rollout_is=sequence"],
    ],
)
def test_good_settings_pass(overrides: list[str]) -> None:
    assert found(overrides) == ([], [])


def test_the_checks_are_part_of_the_start_and_come_with_the_others(files: list[str]) -> None:
    good = [f"{CORRECTION}.rollout_rs='token_k1,seq_max_k2'", f"{CORRECTION}.rollout_rs_threshold='0.6_1.6,2.5'"]
    assert validate_config(compose_config([*files, *good, f"+{LOSS}.tau_pos=1.5"])) == []
    bad = [f"{LOSS}.loss_mode=vanila", f"{LOSS}.dro_beta=0", f"{CORRECTION}.rollout_is=tokens"]
    with pytest.raises(ConfigError) as error:
        validate_config(compose_config([*files, *bad]))
    for part in ("3 problems", "loss_mode=vanilla", "dro_beta=0.0 must be more than 0", "rollout_is=token "):
        assert part in str(error.value)


def test_a_range_that_is_read_as_a_number_is_caught() -> None:
    first, second = f"{CORRECTION}.rollout_is_threshold", f"{CORRECTION}.rollout_rs_threshold"
    with pytest.raises(ConfigError) as error:
        check_overrides([f"{first}=1_2", f"{second}=0.5_2", "data.train_batch_size=1_024"])
    message = str(error.value)
    assert "=1_2 is read as the number 12" in message and f"{first}=1.0_2.0" in message
    assert "=0.5_2 is read as the number 0.52" in message and f"{second}=0.5_2.0" in message
    assert "train_batch_size" not in message
    config: Any = compose_config([f"{first}=1.0_2.0", f"{second}=0.5_2.0"])
    correction = config.algorithm.rollout_correction
    assert (correction.rollout_is_threshold, correction.rollout_rs_threshold) == ("1.0_2.0", "0.5_2.0")


def test_an_added_key_that_exists_sets_it() -> None:
    config: Any = compose_config([f"+{LOSS}.tau_pos=1.5"])
    assert config.actor_rollout_ref.actor.policy_loss.tau_pos == 1.5
    with pytest.raises(ConfigError, match="rollout_is_thresh is not a key"):
        check_overrides([f"+{CORRECTION}.rollout_is_thresh=2.0"])


def test_the_correction_reaches_both_typed_nodes() -> None:
    typed = omega_conf_to_dataclass({"rollout_correction": {"rollout_is": "token"}}, AlgoConfig)
    assert typed.rollout_correction == RolloutCorrectionConfig.decoupled_token_is()
    assert omega_conf_to_dataclass({"rollout_correction": None}, AlgoConfig).rollout_correction is None
    node = {"policy_loss": {"rollout_correction": {"bypass_mode": True, "loss_type": "reinforce"}}}
    actor = omega_conf_to_dataclass(node, FSDPActorConfig)
    assert actor.policy_loss.rollout_correction.get("loss_type") == "reinforce"


PRESETS = sorted(
    name for name, member in inspect.getmembers(RolloutCorrectionConfig, inspect.ismethod) if not name.startswith("_")
)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_what_their_names_say(name: str) -> None:
    preset = getattr(RolloutCorrectionConfig, name)()
    assert preset.bypass_mode is name.startswith("bypass")
    assert preset.loss_type == ("reinforce" if "_pg_" in name else "ppo_clip")
    level = "token" if "token_" in name else "sequence" if "seq_" in name or name == "bypass_pg_is" else None
    assert preset.rollout_is == level
    rejection = {"geo_rs": "seq_mean_k1", "k3_rs": "seq_mean_k3", "seq_is_rs": "seq_sum_k1"}
    assert preset.rollout_rs == next((option for part, option in rejection.items() if part in name), None)
    if level:
        upper, lower = parse_is_threshold(preset.rollout_is_threshold)
        assert (upper, lower) == ((5.0, 0.5) if "icepop" in name else (2.0, None))
    if preset.rollout_rs:
        parse_rs_thresholds(parse_rs_options(preset.rollout_rs), preset.rollout_rs_threshold)


def test_there_are_as_many_presets_as_in_the_reference() -> None:
    assert len(PRESETS) == 19
