"""Options at verl's old places move to the keys that are read; flags of Hydra work or are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlflow.config.command_line import read_command_line
from rlflow.config.old_keys import MOVED, OTHER_PLACES, OVER_ALL_RANKS, RENAMED, move_old_keys, renamed
from rlflow.config.overrides import compose_config
from rlflow.config.targets import drop_targets
from rlflow.trainer.prepare import prepare_config
from rlflow.utils.errors import ConfigError

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def moved(*overrides: str) -> tuple[Any, list[str]]:
    config = compose_config(["trainer.n_gpus_per_node=2", *overrides])
    problems: list[str] = []
    notices = move_old_keys(config, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return config, notices


def test_a_tree_without_old_keys_stays_as_it_is() -> None:
    config, notices = moved()
    assert notices == [] and config == compose_config(["trainer.n_gpus_per_node=2"])


def test_every_old_place_and_its_new_one_exist() -> None:
    config = compose_config()
    for old, new in [*MOVED.items(), *OTHER_PLACES.items(), *OVER_ALL_RANKS.items()]:
        for key in (old, new):
            node, _, name = key.rpartition(".")
            assert name in OmegaConf.select(config, node), key
    for new in RENAMED.values():
        node = new.rstrip(".") if new.endswith(".") else new.rpartition(".")[0]
        free = node.startswith("reward.reward_kwargs")
        assert free or OmegaConf.select(config, node) is not None, new


def test_a_custom_reward_function_given_at_its_old_place_is_used() -> None:
    config, notices = moved("custom_reward_function.path=/a.py")
    assert config.reward.custom_reward_function.path == "/a.py"
    assert config.reward.custom_reward_function.name == "compute_score"  # the default is not overwritten by nothing
    assert config.custom_reward_function.path is None
    assert len(notices) == 1 and "reward.custom_reward_function.path" in notices[0]


def test_a_reward_model_given_at_its_old_place_is_used() -> None:
    config, notices = moved(
        "reward_model.enable=true", "reward_model.model.path=/rm", "reward_model.rollout.prompt_length=77"
    )
    model = config.reward.reward_model
    assert model.enable is True and model.model_path == "/rm" and model.rollout.prompt_length == 77
    assert len(notices) == 3


def test_a_reward_manager_by_its_file_is_a_class_to_import() -> None:
    config, _ = moved("reward_model.reward_loop_module_path=/m.py", "reward_model.reward_loop_class_name=Mine")
    manager = config.reward.reward_manager
    assert (manager.source, manager.module.path, manager.name) == ("importlib", "/m.py", "Mine")


@pytest.mark.parametrize(("old", "new"), OVER_ALL_RANKS.items())
def test_sizes_over_all_processes_are_divided(old: str, new: str) -> None:
    config, notices = moved(f"{old}=16")
    assert OmegaConf.select(config, new) == 8 and "for each process" in notices[0]


def test_processes_that_share_rows_count_as_one() -> None:
    config, _ = moved(f"{ACTOR}.ppo_micro_batch_size=16", f"{ACTOR}.ulysses_sequence_parallel_size=2")
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 16


@pytest.mark.parametrize(("size", "advice"), [(1, "per_gpu=1"), (7, "per_gpu=4"), (0, "per_gpu=1")])
def test_sizes_that_cannot_be_divided_name_the_nearest(size: int, advice: str) -> None:
    with pytest.raises(ConfigError, match=rf"must be >= n_gpus(.|\n)*{advice}"):
        moved(f"{ACTOR}.ppo_micro_batch_size={size}")


def test_both_places_with_different_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="You have set both"):
        moved(f"{ACTOR}.ppo_micro_batch_size=16", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4")
    config, _ = moved(f"{ACTOR}.ppo_micro_batch_size=16", f"{ACTOR}.ppo_micro_batch_size_per_gpu=8")
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 8


def test_other_places_of_one_option() -> None:
    config, notices = moved(f"{ACTOR}.grad_clip=0.5", f"{ACTOR}.use_prefix_grouper=true", f"{MODEL}.lora.rank=8")
    actor = config.actor_rollout_ref.actor
    assert actor.optim.clip_grad == 0.5 and actor.fsdp_config.share_prompts is True
    assert config.actor_rollout_ref.model.lora_rank == 8 and len(notices) == 3


def test_an_option_without_a_successor_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no place any more"):
        moved("reward_model.model.external_lib=mine")


def test_keys_that_the_tree_never_had_are_rewritten() -> None:
    texts, notices = renamed(
        [
            "critic.model.fsdp_config.param_offload=true",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
            f"{ROLLOUT}.update_weights_bucket_megabytes=64",
            "data.train_batch_size=4",
        ]
    )
    assert texts == [
        "critic.fsdp.param_offload=true",
        "+reward.reward_kwargs.overlong_buffer_cfg.enable=True",
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=64",
        "data.train_batch_size=4",
    ]
    assert len(notices) == 3
    compose_config(texts)


def test_options_of_hydra_are_named_and_flags_that_cannot_work_are_refused() -> None:
    line = read_command_line(["hydra.run.dir=/x", "trainer.total_epochs=1", "hydra.verbose=true"])
    assert line.overrides == ["trainer.total_epochs=1"]
    assert "trainer.default_local_dir" in line.notices[0] and "no launcher" in line.notices[1]
    for arguments, expected in (
        (["--multirun", "a=1,2"], r"--multirun is not an option here(.|\n)*start several"),
        (["--config-name=dapo_trainer"], r"the package has no such tree(.|\n)*ppo_megatron_trainer"),
        (["--config-path", "/nowhere", "--config-name", "dapo"], r"there is no .*dapo.yaml"),
    ):
        [problem] = read_command_line(arguments).problems
        assert re.search(expected, problem)
    assert read_command_line(["--config-path=config", "--config-name=ppo_megatron_trainer.yaml"]).config == (
        "ppo_megatron_trainer"
    )


def test_a_config_file_of_the_users_builds_on_the_packages(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "hydra:\n  searchpath:\n    - file://verl/trainer/config\n"
        "defaults:\n  - ppo_trainer\n  - _self_\n"
        "data:\n  train_batch_size: 12\n"
        "actor_rollout_ref:\n  actor:\n    _target_: verl.workers.config.FSDPActorConfig\n    clip_ratio_high: 0.28\n"
    )
    line = read_command_line([f"--config-path={tmp_path}", "--config-name=mine", "trainer.total_epochs=2"])
    config = compose_config(line.overrides, line.config)
    assert config.data.train_batch_size == 12 and config.trainer.total_epochs == 2
    notice = drop_targets(config, [])
    assert notice is not None and ACTOR in notice and "_target_" not in config.actor_rollout_ref.actor


def test_targets_must_name_the_type_of_their_node() -> None:
    config = compose_config(
        [f"+{ACTOR}.optim._target_=verl.workers.config.FSDPOptimizerConfig", "+reward.reward_kwargs._target_=my.Thing"]
    )
    problems: list[str] = []
    drop_targets(config, problems)
    assert not problems
    assert config.reward.reward_kwargs._target_ == "my.Thing"  # a free node
    for other in ("verl.workers.config.McoreOptimizerConfig", "my.package.FSDPOptimizerConfig"):
        drop_targets(compose_config([f"+{ACTOR}.optim._target_={other}"]), problems)
        assert "follows from its place" in problems.pop()


def test_group_choices_of_verl_work(files: list[str]) -> None:
    config = compose_config(["actor@actor_rollout_ref.actor=megatron_actor"])
    assert config.actor_rollout_ref.actor.strategy == "megatron"
    with pytest.raises(ConfigError, match="one of dp_actor, megatron_actor|one of actor, dp_actor, megatron_actor"):
        compose_config(["actor@actor_rollout_ref.actor=veomni_actor"])
    with pytest.raises(ConfigError, match="model_engine=megatron(.|\n)*try:    model_engine=dp"):
        prepare_config([*files, "model_engine=megatron", "trainer.device=cpu"], lambda text: None)


def test_a_command_line_in_old_words_is_prepared_with_a_notice_for_each(files: list[str], tmp_path: Path) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text("def compute_score(**kwargs):\n    return 0.0\n")
    notices: list[str] = []
    old = [f"custom_reward_function.path={scorer}", "hydra.run.dir=.", "trainer.device=cpu", "trainer.nnodes=1"]
    config = prepare_config([*files, *old, "data.truncation=left"], notices.append)
    assert config.reward.custom_reward_function.path == str(scorer)
    text = "\n".join(notices)
    assert "hydra.run.dir has no effect" in text and "data.truncation has no effect" in text
    assert "custom_reward_function.path" in text


def test_switches_and_values_of_older_versions() -> None:
    texts, notices = renamed(["trainer.remove_previous_ckpt_in_save=True"])
    assert texts == ["trainer.max_actor_ckpt_to_keep=1", "trainer.max_critic_ckpt_to_keep=1"] and len(notices) == 1
    assert renamed(["+trainer.remove_previous_ckpt_in_save=false"])[0] == []
    config, notices = moved(f"{ROLLOUT}.load_format=dummy_dtensor")
    assert config.actor_rollout_ref.rollout.load_format == "dummy" and "=dummy" in notices[0]


def test_old_options_that_nothing_reads_any_more_are_named_and_left_out() -> None:
    texts, notices = renamed(["reward_model.model.fsdp_config.param_offload=True", "trainer.total_epochs=1"])
    assert texts == ["trainer.total_epochs=1"] and "has no effect: a reward model is served" in notices[0]


def test_what_was_an_option_of_its_own_is_added_to_a_free_group() -> None:
    texts, _ = renamed(["reward_model.overlong_buffer.len=64"])
    assert texts == ["+reward.reward_kwargs.overlong_buffer_cfg.len=64"]
    assert compose_config(texts).reward.reward_kwargs.overlong_buffer_cfg.len == 64


def test_problems_of_every_kind_are_reported_at_once() -> None:
    arguments = ["--multirun", "data=5", "trainer.totl_epochs=3", f"{ACTOR}.ppo_micro_batch_size=7"]
    arguments += [f"+{ACTOR}.optim._target_=my.Optimizer", "algorithm.adv_estimator=grop"]
    with pytest.raises(ConfigError) as error:
        prepare_config(arguments, print)
    text = str(error.value)
    for part in ("--multirun", "data=5 cannot be set", "totl_epochs", "does not divide", "my.Optimizer", "name is not"):
        assert part in text, part
    assert "adv_estimator=gr" in text
