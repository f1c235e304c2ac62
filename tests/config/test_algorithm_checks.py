"""What an estimator, the group filter and rollout correction need is there before anything starts."""

from __future__ import annotations

import pytest

from rlflow.config.checks import validate_config
from rlflow.config.overrides import compose_config
from rlflow.trainer.name_checks import check_user_names
from rlflow.utils.errors import ConfigError

FILTER = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"]
GDPO = ["algorithm.adv_estimator=gdpo"]
TWO_REWARDS = [*GDPO, "algorithm.gdpo_reward_keys=[a,b]"]
ADAPTIVE = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"]
FUSED = ["actor_rollout_ref.actor.fuse_old_log_prob=true", "data.train_batch_size=256"]
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
        ([*TWO_REWARDS, "algorithm.gdpo_reward_weights=[0,0.0]"], r"not all 0[^$]*=\[1.0, 1.0\]"),
        ([*TWO_REWARDS, "algorithm.gdpo_reward_weights=[1,nan]"], "must be finite"),
        ([*GDPO, "algorithm.gdpo_reward_keys=[a,b,a]"], r"twice[^$]*gdpo_reward_keys=\[a,b\]"),
        # 1024 prompts x 4 sessions
        ([*ADAPTIVE, "algorithm.kl_ctrl.horizon=819"], r"819 is less than the 4096 rows[^$]*horizon=40960"),
        ([*GDPO, "algorithm.gdpo_reward_keys=[a]", "algorithm.use_kl_in_reward=true"], "use_kl_loss=true"),
        (["algorithm.rollout_correction.rollout_is=token", NO_LOG_PROBS], "calculate_log_probs=true"),
        ([*BYPASS, "algorithm.adv_estimator=optimal_token_baseline"], "which adv_estimator=optimal_token_baseline"),
        ([*BYPASS, "actor_rollout_ref.actor.calculate_sum_pi_squared=true"], "bypass_mode=false"),
        (OVERLONG, r"overlong_buffer_cfg\.len=null must be between 1 and 512"),
        ([*OVERLONG, "+reward.reward_kwargs.overlong_buffer_cfg.len=900"], "between 1 and 512"),
        ([*OVERLONG, "+reward.reward_kwargs.overlong_bufer_cfg.len=9"], "overlong_bufer_cfg"),
        (["algorithm.use_pf_ppo=true"], "PF-PPO .* is not in this version[^$]*algorithm.use_pf_ppo=false"),
        (["algorithm.pf_ppo.weight_pow=3"], r"pf_ppo\.weight_pow=3.0: PF-PPO[^$]*weight_pow=2.0"),
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
        (FILTER[1:], "filter_groups.metric has no effect"),
        (["algorithm.filter_groups.max_num_gen_batches=3"], "filter_groups.max_num_gen_batches has no effect"),
        (["algorithm.rollout_correction.loss_type=reinforce"], "loss_type=reinforce has no effect"),
        (["algorithm.rollout_correction.rollout_is_batch_normalize=true"], "batch_normalize=True has no effect"),
        (
            [*ADAPTIVE, "algorithm.kl_ctrl.horizon=2048"],
            "less than the 4096 rows of a step, which may change kl_coef by 40%",
        ),
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
        ["algorithm.use_pf_ppo=false", "algorithm.pf_ppo.reweight_method=pow", "algorithm.pf_ppo.weight_pow=2"],
    ],
)
def test_what_works_passes(check, overrides: list[str]) -> None:
    check(*overrides)


@pytest.mark.parametrize("value", ["nan", "-0.1", "1.1"])
@pytest.mark.parametrize("name", ["gamma", "lam"])
def test_discounts_lie_between_0_and_1(check, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value} must be between 0 and 1.\n    try:    algorithm.{name}=1"):
        check(f"algorithm.{name}={value}")


def test_a_fused_pass_has_nothing_for_an_estimator_of_your_own(check, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlflow.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    assert not any("old_log_probs" in notice for notice in check(*FUSED))
    monkeypatch.setitem(ADV_ESTIMATOR_REGISTRY, "mine", ADV_ESTIMATOR_REGISTRY["grpo"])
    notices = check(*FUSED, "algorithm.adv_estimator=mine")
    assert any("your estimator mine gets no old_log_probs" in notice for notice in notices)
