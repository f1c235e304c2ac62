"""What is said about one key."""

from __future__ import annotations

import pytest

from rlflow.config.describe import describe
from rlflow.config.key_states import matches
from rlflow.utils.errors import ConfigError


def test_a_key_is_described_from_its_yaml_its_type_and_its_rule() -> None:
    found = describe("actor_rollout_ref.actor.loss_agg_mode")
    assert found.default == "token-mean" and found.type == "a text" and "token-sum" in found.allowed
    assert found.defined_in.startswith("actor/actor.yaml:") and found.state == "honoured"
    assert found.description.startswith("token-mean, ")


def test_a_default_that_follows_another_key_names_it() -> None:
    assert describe("actor_rollout_ref.rollout.prompt_length").follows == "data.max_prompt_length"
    contents = describe("critic.checkpoint.load_contents")
    assert contents.follows == "critic.checkpoint.save_contents" and "hf_model" in contents.allowed


def test_an_inert_key_says_why() -> None:
    found = describe("data.reward_fn_key")
    assert found.state == "inert" and "data_source" in found.reason


def test_a_key_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean data\.train_batch_size"):
        describe("data.train_batchsize")


@pytest.mark.parametrize(
    ("pattern", "key", "fits"),
    [
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.b.c", False),
        ("a.**", "a", True),
        ("a.**", "a.b.c", True),
        ("**.qat.**", "x.y.qat", True),
        ("**.qat.**", "qat.z", True),
        ("**.qat", "x.fqat", False),
        ("**.lr_*", "x.lr_a", True),
    ],
)
def test_patterns(pattern: str, key: str, fits: bool) -> None:
    assert matches(pattern, key) is fits


def test_names_that_are_known_without_torch_are_those_that_are_registered() -> None:
    from rlflow.config.choices import ESTIMATORS, LOSSES
    from rlflow.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, AdvantageEstimator

    assert set(ESTIMATORS) == {name.value for name in AdvantageEstimator}
    assert set(LOSSES) <= set(POLICY_LOSS_REGISTRY)
