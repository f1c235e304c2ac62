"""Fifty command lines that cannot work, and what the user is told about each."""

from __future__ import annotations

import importlib.util
import re

import pytest

from rlflow.config.checks import validate_config
from rlflow.config.overrides import compose_what_can_be
from rlflow.trainer.name_checks import check_user_names
from rlflow.utils.errors import ConfigError

A, G, C = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm"
STATIC = [f"{A}.use_dynamic_bsz=false", f"{G}.log_prob_micro_batch_size_per_gpu=8"]
ABSENT = {"peft", "swanlab", "prometheus_client"}
# (overrides, what the message says: the value, why not, what to try)
VARIANTS: list[tuple[list[str], list[str]]] = [
    # unknown keys
    (["trainer.total_epoch=3"], ["trainer.total_epoch is not a key", "did you mean trainer.total_epochs"]),
    (["trainer.max_steps=3"], ["trainer.max_steps is not a key", "trainer takes no other keys"]),
    (["data.train_batchsize=8"], ["did you mean data.train_batch_size"]),
    (["rollout.n=5"], ["rollout.n is not a key", f"did you mean {G}.n"]),
    ([f"{A}.lr=1e-6"], [f"{A}.lr is not a key", f"{A}.optim.lr"]),
    (["actor.ppo_mini_batch_size=4"], [f"did you mean {A}.ppo_mini_batch_size"]),
    (["data.n_gpus_per_node=2"], ["did you mean trainer.n_gpus_per_node"]),
    ([f"+{G}.temprature=0.7"], [f"did you mean {G}.temperature", f"{G} takes no other keys"]),
    (["~trainer.save_freq"], ["~trainer.save_freq cannot take the option away", "default (-1)"]),
    (["model_engine=fdsp"], ["model_engine=fdsp", "try:    model_engine=dp"]),
    # what the command line's grammar makes of it
    (["--trainer.nnodes=1"], ["'--trainer.nnodes=1' is not an override", "try:    trainer.nnodes=1, without dashes"]),
    (["trainer.total_epochs"], ["is not an override", "try:    trainer.total_epochs=..."]),
    (["trainer.total_epochs:3"], ["try:    trainer.total_epochs=3"]),
    (["trainer.project_name=a=b"], ["""try:    'trainer.project_name="a=b"'"""]),
    ([f"{C}.rollout_correction.rollout_is_threshold=1_2"], ["the number 12, not as a range", "threshold=1.0_2.0"]),
    ([f"{C}.rollout_correction.rollout_rs_threshold=2_3.5"], ["the number 23.5", "threshold=2.0_3.5"]),
    (
        [f"{C}.rollout_correction.rollout_rs=token_k1,seq_max_k2"],
        ["several values to run one after the other", f"""'{C}.rollout_correction.rollout_rs="token_k1,seq_max_k2"'"""],
    ),
    (["data.train_files=a.parquet,b.parquet"], ["try:    'data.train_files=[a.parquet,b.parquet]'"]),
    (["trainer.experiment_name=2024_05"], ["the number 202405", """try:    'trainer.experiment_name="2024_05"'"""]),
    (["trainer.experiment_name=1e5"], ["the number 100000.0", """try:    'trainer.experiment_name="1e5"'"""]),
    # types and single values
    (["trainer.n_gpus_per_node=two"], ["trainer.n_gpus_per_node=two must be a whole number", "try:"]),
    ([f"{A}.optim.lr=-1"], [f"{A}.optim.lr=-1", "at least 0", f"try:    {A}.optim.lr=1e-06"]),
    ([f"{G}.temperature=0"], ["degenerate log-probs", f"try:    {G}.temperature=1.0"]),
    ([f"{G}.top_p=1.5"], [f"{G}.top_p=1.5", f"try:    {G}.top_p=1.0"]),
    ([f"{A}.clip_ratio_c=0.5"], ["clip_ratio_c=0.5", "> 1"]),
    ([f"{A}.loss_agg_mode=mean"], ["Invalid loss_agg_mode", "token-mean"]),
    (
        ["algorithm.adv_estimator=grppo"],
        ["algorithm.adv_estimator=grppo is unknown", "try:    algorithm.adv_estimator=grpo"],
    ),
    ([f"{A}.policy_loss.loss_mode=gsp"], ["loss_mode=gsp is unknown", f"try:    {A}.policy_loss.loss_mode=gspo"]),
    ([f"{A}.kl_loss_type=low_var"], [f"try:    {A}.kl_loss_type=low_var_kl"]),
    ([f"{A}.fsdp_config.dtype=fp8"], ["dtype=fp8 is unknown", "choices: bf16, bfloat16, float32, fp32"]),
    ([f"{A}.optim.optimizer=AdamX"], ["torch.optim has no such class", "optimizer=AdamW"]),
    ([f"{G}.mode=sync"], ["rollout.mode", "mode=async"]),
    (["trainer.resume_mode=always"], ["resume_mode=always is unknown", "choices: auto, disable, resume_path"]),
    (["reward.reward_manager.name=naiv"], ["try:    reward.reward_manager.name=naive"]),
    # batch arithmetic
    (
        ["data.train_batch_size=60", f"{A}.ppo_mini_batch_size=16"],
        ["not a multiple", f"try:    {A}.ppo_mini_batch_size=12 (48 rows)"],
    ),
    (["data.train_batch_size=4"], ["is more than data.train_batch_size=4", f"try:    {A}.ppo_mini_batch_size=4"]),
    (
        [
            *STATIC,
            f"{A}.ppo_micro_batch_size_per_gpu=8",
            f"{G}.n=5",
            "data.train_batch_size=60",
            f"{A}.ppo_mini_batch_size=60",
        ],
        [
            "60 prompts x rollout.n=5 = 300 rows",
            "8 ranks x ppo_micro_batch_size_per_gpu=8",
            "a multiple of 64",
            "=64 (320 rows)",
        ],
    ),
    (STATIC, [f"{A}.ppo_micro_batch_size_per_gpu is not set", f"try:    {A}.use_dynamic_bsz=true"]),
    (
        ["trainer.n_gpus_per_node=6", f"{A}.fsdp_config.ulysses_sequence_parallel_size=4", f"{G}.n=3"],
        ["ulysses_sequence_parallel_size=4 does not divide the 6 ranks", "ulysses_sequence_parallel_size=3"],
    ),
    (
        [f"{A}.fsdp_config.ulysses_sequence_parallel_size=2", "actor_rollout_ref.model.use_remove_padding=false"],
        ["you must enable `use_remove_padding`", "try:    actor_rollout_ref.model.use_remove_padding=true"],
    ),
    ([f"{A}.fsdp_config.fsdp_size=3"], ["fsdp_size=3 does not divide the 8 ranks", "fsdp_size=2"]),
    ([f"{G}.pipeline_model_parallel_size=0"], ["pipeline_model_parallel_size=0 must be at least 1"]),
    (["data.train_batch_size=0"], ["data.train_batch_size=0 must be at least 1"]),
    # token budgets
    (
        [f"{A}.ppo_max_token_len_per_gpu=1000", "data.max_response_length=2048"],
        ["prompt 512 + response 2048 = 2560 tokens", f"try:    {A}.ppo_max_token_len_per_gpu=2560"],
    ),
    (
        [f"{G}.max_model_len=600"],
        ["max_model_len=600 is less than prompt + response = 1024", f"try:    {G}.max_model_len=1024"],
    ),
    # files and folders
    (
        ["data.train_files=/nowhere/train.parquet"],
        ["data.train_files=/nowhere/train.parquet: no such file", "data_preprocess"],
    ),
    (["data.val_files=[]"], ["data.val_files is empty", "try:    data.val_files=/path/to/file.parquet"]),
    (["actor_rollout_ref.model.path=/nowhere/model"], ["no config.json there", "a hub id such as"]),
    (["actor_rollout_ref.model.path=my/models/llama"], ["my/models/llama: no config.json there"]),
    (["reward.custom_reward_function.path=/nowhere.py"], ["/nowhere.py: no such file", "pkg://"]),
    (["trainer.resume_mode=resume_path"], ["resume_from_path=null is no checkpoint folder", "resume_mode=auto"]),
    (["trainer.save_freq=1", "trainer.default_local_dir=/proc/nope"], ["/proc/nope cannot be written", "save_freq=-1"]),
    # what does not go together
    (["algorithm.adv_estimator=gae"], ["critic.model.path", "needs a critic", "try:    critic.model.path="]),
    (["algorithm.filter_groups.enable=true"], ["needs algorithm.filter_groups.metric", "metric=acc"]),
    (["trainer.val_only=true", "trainer.val_before_train=false"], ["would validate never", "val_before_train=true"]),
    (["trainer.logger=[console,vemlp_wandb]"], ["vemlp_wandb", "try:    trainer.logger=[console,file]"]),
]


def message_of(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        config, unusable = compose_what_can_be(overrides)
        validate_config(config, check_user_names, overrides=overrides, unusable=unusable)
    return str(error.value)


def test_a_package_that_is_missing_is_named_with_its_extra(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name in ABSENT else find(name, *more))
    wanted = {
        "actor_rollout_ref.model.lora_rank=8": "rlflow[lora]",
        "trainer.logger=[swanlab]": "rlflow[swanlab]",
        "transfer_queue.metrics.enabled=true": "rlflow[metrics]",
    }
    message = message_of([*files, *wanted])
    assert "3 problems" in message and all(f"pip install '{extra}'" in message for extra in wanted.values())


def test_there_are_fifty() -> None:
    assert len(VARIANTS) >= 50


@pytest.mark.parametrize(("overrides", "parts"), VARIANTS, ids=[" ".join(row[0])[-60:] for row in VARIANTS])
def test_each_broken_variant_gets_the_right_message(files: list[str], overrides: list[str], parts: list[str]) -> None:
    message = message_of([*files, *overrides])
    missing = [part for part in parts if part not in message]
    assert not missing, message
    problems = re.split(r"^- ", message, flags=re.MULTILINE)
    for text in problems[1:] if len(problems) > 1 else problems:
        assert text.count("\n    set in: ") == 1 and text.count("\n    try: ") == 1, text


def test_everything_wrong_is_said_at_once_with_where_it_was_set(files: list[str]) -> None:
    message = message_of([*files, "trainer.total_epoch=3", "rollout.n=2", f"{G}.temperature=0", f"{A}.ppo_epochs=0"])
    assert message.startswith("the configuration has 4 problems:\n")
    assert "temperature=0.0: greedy rollouts" in message and f"{A}.ppo_epochs=0 must be at least 1" in message


def test_a_default_and_what_follows_a_key_say_so(files: list[str]) -> None:
    without_data = [text for text in files if not text.startswith("data.val_files")]
    assert re.search(
        r"val_files=.*\n    set in: default \(rlflow/config/data/legacy_data.yaml:\d+\)", message_of(without_data)
    )
    followed = message_of([*files, "data.max_response_length=-4"])
    assert f"{G}.response_length=-4" in followed
    assert "set in: follows data.max_response_length (command line)" in followed


def test_a_problem_of_a_misspelt_key_is_said_once(files: list[str]) -> None:
    without = [text for text in files if not text.startswith("data.train_files")]
    message = message_of([*without, "data.train_file=/data/x.parquet"])
    assert "did you mean data.train_files" in message and "1 problem:" in message
