"""Commands for engines and trainers that are not here get one answer, and following it leads to a plan."""

from __future__ import annotations

from rlflow.config.unbuilt_commands import read_as_built

ACTOR = "actor_rollout_ref.actor"


def test_a_command_for_our_own_engine_stays_as_it_is() -> None:
    given = ["data.train_batch_size=4", f"{ACTOR}.optim.lr=1e-6", f"{ACTOR}.optim.override_optimizer_config.eps=1"]
    assert read_as_built(given, "ppo_trainer") == (given, "ppo_trainer", [])


def test_megatrons_options_become_fsdps_or_are_named() -> None:
    texts, tree, [problem] = read_as_built(
        [
            "data.train_batch_size=4",
            f"{ACTOR}.megatron.param_offload=True",
            f"{ACTOR}.megatron.context_parallel_size=2",
            f"{ACTOR}.megatron.tensor_model_parallel_size=4",
            f"+{ACTOR}.megatron.override_transformer_config.moe_router_dtype=fp32",
            "critic.megatron.optimizer_offload=True",
            f"{ACTOR}.optim.lr_decay_style=cosine",
        ],
        "ppo_megatron_trainer",
    )
    assert tree == "ppo_trainer" and texts == [
        "data.train_batch_size=4",
        f"{ACTOR}.fsdp_config.param_offload=True",
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        "critic.fsdp.optimizer_offload=True",
        f"{ACTOR}.optim.lr_scheduler_type=cosine",
    ]
    advice = problem.text.partition("try:")[2]
    assert f"--config-name=ppo_trainer model_engine=dp {ACTOR}.fsdp_config.param_offload=True" in advice
    without = advice.partition("without ")[2]
    assert "tensor_model_parallel_size" in without and "moe_router_dtype" in without and "offload" not in without


def test_the_asynchronous_trainers_keys_are_one_problem() -> None:
    given = ["async_training.partial_rollout=True", "rollout.nnodes=2", "data.train_batch_size=4"]
    texts, tree, [problem] = read_as_built(
        [*given, "trainer.v1.trainer_mode=separate_async"], "fully_async_ppo_trainer"
    )
    assert (texts, tree) == (["data.train_batch_size=4"], "ppo_trainer")
    assert "trainer.v1.trainer_mode=sync, without async_training.partial_rollout, rollout.nnodes" in problem.text
