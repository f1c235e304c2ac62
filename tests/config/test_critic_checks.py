"""When there is a critic, and what a configuration with one may not say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlflow.config.checks import validate_config
from rlflow.config.critic import need_critic
from rlflow.config.overrides import compose_config
from rlflow.utils.errors import ConfigError


@pytest.fixture
def gae(tmp_path: Path) -> list[str]:
    """Overrides of a run that works, with the model folders `policy` and `critic`."""
    for name in ("train.parquet", "val.parquet"):
        (tmp_path / name).write_text("")
    for name in ("policy", "critic"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": 100}))
    return [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/val.parquet",
        f"actor_rollout_ref.model.path={tmp_path}/policy",
        f"critic.model.path={tmp_path}/critic",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "trainer.n_gpus_per_node=2",
        "trainer.logger=[console,file]",
    ]


def problems_of(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        validate_config(compose_config(overrides))
    return str(error.value)


def test_a_critic_follows_the_actor_and_is_there_for_gae(gae: list[str]) -> None:
    config = compose_config([*gae, "actor_rollout_ref.actor.ppo_epochs=3", "actor_rollout_ref.actor.shuffle=true"])
    assert validate_config(config) == []
    assert need_critic(config)
    assert (config.critic.ppo_epochs, config.critic.shuffle, config.critic.use_dynamic_bsz) == (3, True, True)
    assert config.critic.ppo_mini_batch_size == config.actor_rollout_ref.actor.ppo_mini_batch_size == 256
    assert (config.critic.optim.lr, config.actor_rollout_ref.actor.optim.lr) == (1e-5, 1e-6)
    assert not need_critic(compose_config([*gae, "algorithm.adv_estimator=grpo"]))
    assert need_critic(compose_config([*gae, "algorithm.adv_estimator=grpo", "critic.enable=true"]))


def test_without_gae_nothing_is_asked_of_the_critic(gae: list[str]) -> None:
    others = [item for item in gae if not item.startswith("critic.")]
    validate_config(compose_config([*others, "algorithm.adv_estimator=grpo"]))


def test_an_unset_model_is_named_with_what_to_set(gae: list[str], tmp_path: Path) -> None:
    message = problems_of([item for item in gae if not item.startswith("critic.")])
    assert "critic.model.path is not set" in message
    assert f"try:    critic.model.path={tmp_path}/policy" in message


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["critic.enable=false"], "try:    critic.enable=null"),
        (["critic.enable=false", "trainer.critic_warmup=3"], "there is no critic"),
        (["critic.model.path=/nowhere"], "critic.model.path=/nowhere: no config.json"),
        (["critic.ppo_mini_batch_size=100"], "critic.ppo_mini_batch_size=128 (128 rows)"),
        (["critic.ppo_mini_batch_size=1"], "critic.ppo_mini_batch_size=2 (2 rows)"),
        (["critic.ppo_mini_batch_size=0"], "critic.ppo_mini_batch_size=0 must be at least 1"),
        (["critic.use_dynamic_bsz=false"], "critic.ppo_micro_batch_size_per_gpu is not set"),
        (["critic.ppo_max_token_len_per_gpu=100"], "critic.forward_max_token_len_per_gpu=1024"),
        (["critic.cliprange_value=0"], "critic.cliprange_value=0.0 must be more than 0"),
        (["critic.optim.lr=-1"], "critic.optim.lr=-1.0 must be at least 0"),
        (["critic.optim.optimizer=AdamX"], "critic.optim.optimizer=AdamW"),
        (["critic.strategy=megatron"], "critic.strategy=fsdp"),
        (["critic.fsdp.dtype=int8"], "critic.fsdp.dtype=bfloat16"),
        (["critic.fsdp.forward_only=true"], "never trained"),
        (["critic.loss_agg_mode=mean"], "critic.loss_agg_mode='mean'"),
        (["algorithm.gamma=1.5"], "algorithm.gamma=1.5 must be between 0 and 1"),
    ],
)
def test_values_no_critic_can_use(gae: list[str], overrides: list[str], part: str) -> None:
    assert part in problems_of([*gae, *overrides])


def test_what_the_critic_takes_over_from_the_actor_is_reported_once(gae: list[str]) -> None:
    message = problems_of([*gae, "actor_rollout_ref.actor.ppo_mini_batch_size=100"])
    assert "1 problem" in message and "actor_rollout_ref.actor.ppo_mini_batch_size=128" in message


def test_a_critic_must_know_the_tokens_of_the_policy(gae: list[str], tmp_path: Path) -> None:
    (tmp_path / "critic" / "config.json").write_text(json.dumps({"vocab_size": 99}))
    assert f"knows 99 tokens, the policy at {tmp_path}/policy knows 100" in problems_of(gae)
    (tmp_path / "critic" / "config.json").write_text(json.dumps({"vocab_size": 128}))
    assert validate_config(compose_config(gae)) == []


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("critic.model.custom_chat_template=x", "custom_chat_template is not read"),
        ("trainer.critic_warmup=3", "the policy is never updated"),
    ],
)
def test_settings_without_an_effect_get_a_notice(gae: list[str], override: str, part: str) -> None:
    assert any(part in n for n in validate_config(compose_config([*gae, "trainer.total_training_steps=2", override])))


def test_a_critic_that_no_advantage_uses_gets_a_notice(gae: list[str]) -> None:
    notices = validate_config(
        compose_config([*gae, "algorithm.adv_estimator=grpo", "critic.enable=true", "actor_rollout_ref.rollout.n=2"])
    )
    assert any("no advantage uses its values" in n for n in notices)
