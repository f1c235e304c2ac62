"""Deletions and additions on the command line do what the message says, or are refused."""

from __future__ import annotations

import dataclasses

import pytest

from rlflow.config.overrides import check_overrides, compose_config
from rlflow.config.tree import TYPED_NODES, closed_node
from rlflow.utils.errors import ConfigError


@pytest.mark.parametrize(
    "key", ["trainer.save_freq", "reward", "model_engine", "transfer_queue.backend", "ray_kwargs.ray_init"]
)
def test_an_option_cannot_be_taken_away_because_its_default_would_count(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"~{key} cannot take the option away.*default") as error:
        check_overrides([f"~{key}"])
    if key == "trainer.save_freq":
        assert "default (-1)" in str(error.value) and "trainer.save_freq=..." in str(error.value)


def test_a_deletion_of_a_key_that_is_not_there_gets_the_usual_hint() -> None:
    with pytest.raises(ConfigError, match=r"trainer.save_frq is not a key(.|\n)*did you mean trainer.save_freq"):
        check_overrides(["~trainer.save_frq"])


@pytest.mark.parametrize("sign", ["", "+", "++"])
@pytest.mark.parametrize(
    ("key", "node"),
    [
        ("trainer.total_epoch", "trainer"),
        ("actor_rollout_ref.rollout.agent.workers", "actor_rollout_ref.rollout.agent"),
        ("actor_rollout_ref.actor.optim.weight_decays", "actor_rollout_ref.actor.optim"),
    ],
)
def test_typed_nodes_take_no_other_keys_and_the_hint_says_so(sign: str, key: str, node: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_overrides([f"{sign}{key}=1"])
    assert f"{key} is not a key" in str(error.value)
    assert f"{node} takes no other keys" in str(error.value) and "+" not in str(error.value)


@pytest.mark.parametrize(
    "key",
    ["my_node.x", "reward.custom_reward_function.reward_kwargs.k", "actor_rollout_ref.rollout.engine_kwargs.hf.x", "a"],
)
def test_the_advice_to_add_a_key_holds_where_it_is_given(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_overrides([f"{key}=1"])
    assert f"write +{key}=..." in str(error.value)
    compose_config([f"+{key}=1"])


def test_every_typed_node_knows_its_own_keys() -> None:
    for node, kind in TYPED_NODES.items():
        for name in (field.name for field in dataclasses.fields(kind)):
            assert closed_node(f"{node}.{name}") is None
        assert closed_node(f"{node}.no_such_key") == node
