"""What an estimator, the group filter and rollout correction need is there before anything starts."""

from __future__ import annotations

import pytest

from rlflow.config.checks import validate_config
from rlflow.config.overrides import compose_config
from rlflow.trainer.name_checks import check_user_names
from rlflow.utils.errors import ConfigError

FILTER = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"]
GDPO = ["algorithm.adv_estimator=gdpo"]
BYPASS = ["algorithm.rollout_correction.bypass_mode=true"]
OVERLONG = ["reward.reward_manager.name=dapo", "+reward.reward_kwargs.overlong_buffer_cfg.enable=true"]
NO_LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=false"


@pytest.fixture
def check(files: list[str]):
    """`check(*overrides)` -> the notices of a run with these options."""
    return lambda *overrides: validate_config(compose_config([*files, *overrides]), check_user_names)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["algorithm.filter_groups.enable=true"], r"filter_groups\.metric=acc"),
        ([*FILTER, "algorithm.filter_groups.max_inflight_gen_batches=0"], "must be at least 1"),
        ([*FILTER, "actor_rollout_ref.rollout.n=1"], "a group of one cannot vary"),
        (["algorithm.adv_estimator=grpo_passk", "actor_rollout_ref.rollout.n=1"], r"rollout\.n=2"),
        (GDPO, r"gdpo_reward_keys=\[acc,format\]"),
        ([*GDPO, "algorithm.gdpo_reward_keys=[a,b]", "algorithm.gdpo_reward_weights=[1]"], r"=\[1.0, 1.0\]"),
        ([*GDPO, "algorithm.gdpo_reward_keys=[a]", "algorithm.use_kl_in_reward=true"], "use_kl_loss=true"),
        (["algorithm.rollout_correction.rollout_is=token", NO_LOG_PROBS], "calculate_log_probs=true"),
        ([*BYPASS, "algorithm.adv_estimator=optimal_token_baseline"], "which adv_estimator=optimal_token_baseline"),
        ([*BYPASS, "actor_rollout_ref.actor.calculate_sum_pi_squared=true"], "bypass_mode=false"),
        (OVERLONG, r"overlong_buffer_cfg\.len=None must be between 1 and 512"),
        ([*OVERLONG, "+reward.reward_kwargs.overlong_buffer_cfg.len=900"], "between 1 and 512"),
        ([*OVERLONG, "+reward.reward_kwargs.overlong_bufer_cfg.len=9"], "overlong_bufer_cfg"),
    ],
)
def test_what_cannot_work_is_refused_with_what_can(check, overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(*overrides)


@pytest.mark.parametrize(
    ("overrides", "notice"),
    [
        (["actor_rollout_ref.rollout.n=1"], "n=1 with grpo"),
        (["algorithm.gdpo_reward_keys=[acc]"], "grpo does not read algorithm.gdpo_reward_keys"),
        ([*FILTER, "algorithm.filter_groups.max_num_gen_batches=1"], "the first one ends the run"),
    ],
)
def test_what_has_no_effect_gets_a_notice(check, overrides: list[str], notice: str) -> None:
    assert any(notice in text for text in check(*overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        FILTER,
        [*GDPO, "algorithm.gdpo_reward_keys=[acc,format]", "algorithm.gdpo_reward_weights=[1.0,0.5]"],
        [*BYPASS, "algorithm.rollout_correction.loss_type=reinforce"],
        ["algorithm.rollout_correction=null"],
        ["algorithm.rollout_correction.rollout_rs=seq_mean_k1", "algorithm.rollout_correction.rollout_rs_threshold=2"],
        [*OVERLONG, "+reward.reward_kwargs.overlong_buffer_cfg.len=128"],
        ["algorithm.adv_estimator=remax"],
    ],
)
def test_what_works_passes(check, overrides: list[str]) -> None:
    check(*overrides)
