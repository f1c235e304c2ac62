"""The tree, its typed form, unknown keys and impossible values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import rlflow.config as cfg
from rlflow.config.checks import validate_config
from rlflow.config.machine import clamp_to_machine
from rlflow.config.overrides import check_overrides, compose_config
from rlflow.utils.errors import ConfigError


def problems_of(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        validate_config(compose_config(overrides))
    return str(error.value)


def test_every_yaml_key_has_a_comment_above_it() -> None:
    for file in Path(cfg.__file__).parent.rglob("*.yaml"):
        lines = file.read_text().splitlines()
        for number, line in enumerate(lines):
            key = line.strip().split(":")[0]
            if not line.strip() or line.strip().startswith(("#", "-")) or ":" not in line:
                continue
            top_groups = {"defaults", "actor_rollout_ref", "algorithm", "trainer", "ray_kwargs", "hydra", "run", "dir"}
            if key in top_groups:
                continue
            assert lines[number - 1].strip().startswith("#"), f"{file.name}: {key} has no comment"


def test_configs_are_frozen_mappings() -> None:
    config = cfg.FSDPActorConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.clip_ratio = 0.3
    assert "missing" not in config and config.get("missing", 7) == 7
    for kind in (AttributeError, KeyError):
        with pytest.raises(kind):
            config["missing"]
    assert dict(**config)["clip_ratio"] == 0.2


def test_unknown_keys_are_all_named_with_what_was_meant() -> None:
    with pytest.raises(ConfigError) as error:
        check_overrides(
            ["actor_rollout_ref.actor.optim.learning_rate=1", "trainer.total_epoch=3", "data.train_batchsize=8"]
        )
    message = str(error.value)
    assert "trainer.total_epochs" in message and "data.train_batch_size" in message
    assert "actor.optim.learning_rate is not a key" in message


def test_a_key_given_by_its_last_part_is_found() -> None:
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.temperature"):
        check_overrides(["rollout.temperature=1"])


def test_additions_and_engine_choice_pass() -> None:
    check_overrides(["+my.key=1", "model_engine=dp", "trainer.total_epochs=1"])


def test_a_good_configuration_passes(files: list[str]) -> None:
    assert validate_config(compose_config(files)) == []


def test_an_unset_engine_is_named(files: list[str]) -> None:
    message = problems_of([f for f in files if "rollout.name" not in f])
    assert "rollout.name" in message and "rollout.name=hf" in message


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["data.train_batch_size=60", "actor_rollout_ref.actor.ppo_mini_batch_size=16"],
            ["60", "ppo_mini_batch_size=12 (48 rows)"],
        ),
        (
            ["data.train_batch_size=4"],
            ["ppo_mini_batch_size=256", "try:    actor_rollout_ref.actor.ppo_mini_batch_size=4"],
        ),
        (
            [
                "actor_rollout_ref.actor.use_dynamic_bsz=false",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
                "actor_rollout_ref.rollout.n=5",
                "data.train_batch_size=60",
                "actor_rollout_ref.actor.ppo_mini_batch_size=60",
            ],
            ["300 rows", "multiple of 64", "data.train_batch_size=64", "ppo_mini_batch_size=64 (320 rows)"],
        ),
        (["actor_rollout_ref.actor.use_dynamic_bsz=false"], ["ppo_micro_batch_size_per_gpu", "use_dynamic_bsz=true"]),
        (["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100"], ["1024 tokens", "ppo_max_token_len_per_gpu=1024"]),
        (["algorithm.adv_estimator=grppo"], ["adv_estimator=grpo"]),
        (["actor_rollout_ref.rollout.name=vllm"], ["rollout.name=vllm", "rollout.name=hf"]),
        (["actor_rollout_ref.rollout.temperature=0"], ["temperature=1.0"]),
        (["data.train_files=/nowhere/x.parquet"], ["no such file"]),
        (["trainer.resume_mode=resume_path"], ["resume_from_path"]),
        (["reward.custom_reward_function.path=/nowhere.py"], ["no such file"]),
        (["actor_rollout_ref.actor.loss_agg_mode=mean"], ["Invalid loss_agg_mode"]),
        (["trainer.logger=[console,vemlp_wandb]"], ["vemlp_wandb", "trainer.logger=[console,file]"]),
        (["trainer.best_mode=maxx"], ["trainer.best_mode=max "]),
        (["trainer.trace.trajectories_per_step=-1"], ["at least 0"]),
        (["actor_rollout_ref.rollout.mode=sync"], ["mode=async"]),
    ],
)  # fmt: skip
def test_impossible_values_name_the_nearest_possible_one(
    files: list[str], overrides: list[str], parts: list[str]
) -> None:
    message = problems_of([*files, *overrides])
    for part in parts:
        assert part in message


def test_all_problems_come_at_once(files: list[str]) -> None:
    message = problems_of([*files, "data.train_files=/nowhere/x.parquet", "actor_rollout_ref.rollout.temperature=0"])
    assert "2 problems" in message


def test_truncated_sampling_is_never_silent(files: list[str]) -> None:
    assert any(
        "top_p" in notice for notice in validate_config(compose_config([*files, "actor_rollout_ref.rollout.top_p=0.9"]))
    )


def test_process_counts_fit_the_machine(files: list[str]) -> None:
    config: Any = compose_config([*files, "trainer.device=cpu"])
    notice = clamp_to_machine(config, cores=2)
    assert config.trainer.n_gpus_per_node == 2 and config.reward.num_workers == 1
    assert notice is not None and "trainer.n_gpus_per_node 8 -> 2" in notice
    assert clamp_to_machine(config, cores=2) is None
    gpu: Any = compose_config(files)
    assert clamp_to_machine(gpu, cores=2) is None and gpu.trainer.n_gpus_per_node == 8


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("actor_rollout_ref.actor.ppo_epochs=0", "at least 1"),
        ("actor_rollout_ref.actor.optim.lr=nan", "optim.lr=nan"),
        ("data.max_response_length=-4", "response_length=-4"),
        ("actor_rollout_ref.actor.fsdp_config.dtype=bfloat61", "dtype=bfloat16"),
        ("actor_rollout_ref.actor.strategy=megatron", "choices: fsdp, fsdp2"),
        ("actor_rollout_ref.actor.optim.optimizer=AdamX", "optimizer=AdamW"),
        ("actor_rollout_ref.actor.kl_loss_type=k9", "kl_loss_type=k"),
        ("algorithm.kl_ctrl.horizon=0", "kl_ctrl.horizon=0 must be at least 1"),
        ("algorithm.kl_ctrl.target_kl=0", "more than 0"),
        ("actor_rollout_ref.hybrid_engine=false", "must stay true"),
        ("actor_rollout_ref.model.external_lib=/nowhere/mine.py", "cannot be imported"),
        (
            "actor_rollout_ref.model.external_lib=5",
            "actor_rollout_ref.model.external_lib=5 cannot be imported: 5 is a int",
        ),
        ("trainer.logger=null", "trainer.logger is empty"),
        ("trainer.n_gpus_per_node=null", "trainer.n_gpus_per_node=null must be a whole number"),
        ("reward.num_workers=null", "reward.num_workers=null must be a whole number"),
        (
            "algorithm.gdpo_reward_keys=acc",
            "must be a list, each of it a text or null.\n    try:    algorithm.gdpo_reward_keys=[acc]",
        ),
        (
            "algorithm.adv_estimator=null",
            "algorithm.adv_estimator=null must be a text.\n    try:    algorithm.adv_estimator=gae",
        ),
        (
            "actor_rollout_ref.actor.policy_loss.dro_beta=abc",
            "actor_rollout_ref.actor.policy_loss.dro_beta=abc must be a number or null",
        ),
        ("algorithm.filter_groups.metric=[a]", "algorithm.filter_groups.metric=[a] must be a text or null"),
        ("algorithm.filter_groups=4", "algorithm.filter_groups=4 must be a group of options (enable, metric"),
        ("algorithm.filter_groups=null", "algorithm.filter_groups=null must be a group of options (enable, metric"),
        (
            "algorithm.gdpo_reward_keys={a:1}",
            "algorithm.gdpo_reward_keys={a:1} must be a list, each of it a text or null",
        ),
        (
            "algorithm.gdpo_reward_weights=[1,x]",
            "algorithm.gdpo_reward_weights=[1,x] must be a list, each of it a number",
        ),
        ("actor_rollout_ref.actor.policy_loss.rollout_correction=x", "rollout_correction=x must be a group of options"),
        ("algorithm.use_kl_in_reward=maybe", "algorithm.use_kl_in_reward=maybe must be true or false"),
        ("actor_rollout_ref.actor.clip_ratio=-0.2", "at least 0.\n    try:    actor_rollout_ref.actor.clip_ratio=0.2"),
        ("actor_rollout_ref.actor.optim.lr=-1", "try:    actor_rollout_ref.actor.optim.lr=1e-06"),
        ("algorithm.kl_ctrl.target_kl=0", "try:    algorithm.kl_ctrl.target_kl=0.1"),
        ("algorithm.kl_ctrl.kl_coef=nan", "kl_coef=nan must be at least 0"),
        ("algorithm.kl_ctrl.kl_coef=-0.1", "try:    algorithm.kl_ctrl.kl_coef=0.001"),
        ("algorithm.filter_groups.max_num_gen_batches=-1", "max_num_gen_batches=-1 must be at least 0"),
        ("algorithm.adv_estimator=GRPO", "try:    algorithm.adv_estimator=grpo "),
        ("actor_rollout_ref.actor.clip_ratio_c=nan", "clip_ratio_c=nan must be a number > 1"),
        ("reward.timeout_s=0", "more than 0"),
        ("actor_rollout_ref.rollout.temperature=${nowhere.key}", "nowhere"),
    ],
)
def test_values_no_run_can_use_are_refused(files: list[str], override: str, part: str) -> None:
    assert part in problems_of([*files, override])


def test_groups_cannot_be_kept_in_an_order_that_stays(files: list[str]) -> None:
    problems = problems_of([*files, "trainer.balance_batch=false", "trainer.balance_keep_groups=true"])
    assert "try:    trainer.balance_batch=true" in problems


def test_an_engine_that_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="model_engine=dp"):
        compose_config(["model_engine=nope"])


def test_an_added_node_is_not_silent(files: list[str]) -> None:
    assert any("my_node" in notice for notice in validate_config(compose_config([*files, "+my_node.key=1"])))


@pytest.mark.parametrize(
    ("prompts", "n", "ranks", "mini", "micro"), [(6, 1, 2, 3, None), (2, 3, 1, 2, 4), (60, 5, 8, 7, 8)]
)
def test_the_advice_is_itself_accepted(
    files: list[str], prompts: int, n: int, ranks: int, mini: int, micro: int | None
) -> None:
    import re

    base = [*files, f"actor_rollout_ref.rollout.n={n}", f"trainer.n_gpus_per_node={ranks}"]
    if micro:
        base += [
            "actor_rollout_ref.actor.use_dynamic_bsz=false",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro}",
            f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={micro}",
        ]
    tried = [f"data.train_batch_size={prompts}", f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}"]
    advice = re.findall(r"[a-z_.]+batch_size=\d+", problems_of([*base, *tried]).split("try:")[1])
    validate_config(compose_config([*base, *tried, *advice]))


def test_a_folder_that_cannot_hold_checkpoints_is_found_before_the_first_save(files: list[str]) -> None:
    message = problems_of([*files, "trainer.save_freq=1", "trainer.default_local_dir=/proc/nope"])
    assert "trainer.default_local_dir=/proc/nope cannot be written" in message
