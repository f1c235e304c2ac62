"""Sizes of the meshes are checked before anything starts, and the rows of a batch follow them."""

from __future__ import annotations

import pytest

from rlflow.config.checks import validate_config
from rlflow.config.overrides import compose_config
from rlflow.config.parallel_checks import split_over
from rlflow.utils.errors import ConfigError

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
FOUR = ["trainer.n_gpus_per_node=4", "data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=16"]


def problems_of(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        validate_config(compose_config(overrides))
    return str(error.value)


def test_one_key_of_the_actor_reaches_its_engine_and_the_reference(files: list[str]) -> None:
    config = compose_config([*files, f"{ACTOR}.ulysses_sequence_parallel_size=2"])
    for node in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref):
        assert node.fsdp_config.ulysses_sequence_parallel_size == 2
    assert compose_config(["critic.ulysses_sequence_parallel_size=2"]).critic.fsdp.ulysses_sequence_parallel_size == 2


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ([f"{ACTOR}.ulysses_sequence_parallel_size=3"], f"try:    {ACTOR}.ulysses_sequence_parallel_size=2"),
        (
            [f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=3"],
            f"try:    {ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2",
        ),
        (
            [f"{ACTOR}.ulysses_sequence_parallel_size=2", "actor_rollout_ref.model.use_remove_padding=false"],
            "you must enable `use_remove_padding`",
        ),
        (
            [
                "algorithm.adv_estimator=gae",
                "critic.ulysses_sequence_parallel_size=2",
                "critic.model.use_remove_padding=false",
            ],
            "When using sequence parallelism for critic, you must enable `use_remove_padding`",
        ),
        (
            [f"{ACTOR}.ulysses_sequence_parallel_size=4", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"],
            "leave the second unset",
        ),
        ([f"{ACTOR}.fsdp_config.fsdp_size=3"], "fsdp_size=3 does not divide the 4 ranks of the run"),
        ([f"{ACTOR}.fsdp_config.fsdp_size=0"], "fsdp_size=-1"),
        ([f"{ACTOR}.fsdp_config.grad_offload=true"], "param_offload=true"),
        (
            [f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{ACTOR}.ppo_max_token_len_per_gpu=500"],
            "ppo_max_token_len_per_gpu=500 x 2 ranks that share a row",
        ),
    ],
)
def test_meshes_that_cannot_be_are_named(files: list[str], overrides: list[str], part: str) -> None:
    assert part in problems_of([*files, *FOUR, *overrides])


def test_ranks_that_share_no_row_are_one_problem(files: list[str]) -> None:
    found = problems_of([*files, *FOUR, f"{ACTOR}.ulysses_sequence_parallel_size=0"])
    assert "1 problem" in found and f"{ACTOR}.ulysses_sequence_parallel_size=0 does not divide" in found


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{ACTOR}.ulysses_sequence_parallel_size=4"],
        [f"{ACTOR}.fsdp_config.fsdp_size=2", f"{ACTOR}.ulysses_sequence_parallel_size=2"],
        [f"{ACTOR}.fsdp_config.fsdp_size=8"],
        [f"{ACTOR}.ulysses_sequence_parallel_size=4", f"{ACTOR}.ppo_max_token_len_per_gpu=256"],
        # 1 prompt x 4 sessions = 4 rows would not split over 8 ranks, but over 2 parts.
        ["trainer.n_gpus_per_node=8", f"{ACTOR}.ulysses_sequence_parallel_size=4", f"{ACTOR}.ppo_mini_batch_size=1"],
    ],
)
def test_meshes_that_can_be_pass(files: list[str], overrides: list[str]) -> None:
    validate_config(compose_config([*files, *FOUR, *overrides]))


def test_a_batch_is_split_for_every_engine() -> None:
    config = compose_config(["trainer.n_gpus_per_node=12", f"{ACTOR}.ulysses_sequence_parallel_size=4"])
    assert split_over(config, needs_ref=True, needs_critic=False) == 3
    config.actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size = 6
    assert split_over(config, needs_ref=False, needs_critic=False) == 3
    assert split_over(config, needs_ref=True, needs_critic=False) == 6
    assert split_over(config, needs_ref=True, needs_critic=True) == 12
