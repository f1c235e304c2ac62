"""What a configuration with a reward model, or with a reference on its own devices, may not say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlflow.config.checks import validate_config
from rlflow.config.overrides import compose_config
from rlflow.config.reward import is_colocated
from rlflow.trainer.ppo.runtime import resource_pools
from rlflow.trainer.ppo.utils import Role, need_reward_model
from rlflow.utils.errors import ConfigError

OWN = ["reward.reward_model.enable_resource_pool=true", "reward.reward_model.nnodes=1"]
REF = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.ref.enable_resource_pool=true"]


@pytest.fixture
def scored(files: list[str], tmp_path: Path) -> list[str]:
    """Overrides of a run with a reward model that exists."""
    save(tmp_path / "rm", "Qwen2ForSequenceClassification")
    return [*files, "reward.reward_model.enable=true", f"reward.reward_model.model_path={tmp_path}/rm"]


def save(folder: Path, architecture: str, labels: int = 1) -> str:
    folder.mkdir(exist_ok=True)
    named = {str(i): f"LABEL_{i}" for i in range(labels)}
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "id2label": named}))
    return f"reward.reward_model.model_path={folder}"


def problems_of(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        validate_config(compose_config(overrides))
    return str(error.value)


def test_a_good_configuration_passes_in_both_places(scored: list[str]) -> None:
    for more, colocated in ((OWN, False), ([], True)):
        config = compose_config([*scored, *more])
        assert validate_config(config) == []
        assert need_reward_model(config) and is_colocated(config) == colocated
    assert not need_reward_model(compose_config(["actor_rollout_ref.rollout.name=hf"]))


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["reward.reward_model.model_path=null"], "reward.reward_model.model_path is not set"),
        (["reward.reward_model.model_path=/nowhere"], "/nowhere: no config.json"),
        (["reward.reward_model.enable_resource_pool=true"], "reward.reward_model.nnodes=0 must be at least 1"),
        ([*OWN, "reward.reward_model.n_gpus_per_node=0"], "n_gpus_per_node=0 must be at least 1"),
        (["reward.reward_model.rollout.name=vllm"], "reward.reward_model.rollout.name=vllm serves no reward models"),
        (["reward.reward_model.rollout.dtype=int8"], "rollout.dtype=bfloat16"),
        (["reward.reward_model.rollout.request_timeout_s=0"], "request_timeout_s=0.0 must be more than 0"),
        (["reward.reward_manager.name=dapo"], "reward_manager.name=dapo shapes the score of a reward function"),
        (
            ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"],
            "a colocated reward model has not scored them",
        ),
        (["algorithm.adv_estimator=remax"], "a colocated reward model scores later"),
        (
            [*OWN, "algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"],
            "algorithm.filter_groups.metric asks for acc, and a reward model says one number",
        ),
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[score,format]"],
            "algorithm.gdpo_reward_keys asks for format,",
        ),
    ],
)
def test_what_cannot_work_is_named(scored: list[str], overrides: list[str], part: str) -> None:
    assert part in problems_of([*scored, *overrides])


@pytest.mark.parametrize(
    ("architecture", "labels", "part"),
    [
        ("LlamaForCausalLM", 1, "generative reward models are not in this version"),
        ("LlamaForSequenceClassification", 2, "has 2 labels"),
        ("BertModel", 1, "a reward model needs a head"),
    ],
)
def test_a_model_that_cannot_score_is_found_before_anything_starts(
    scored: list[str], tmp_path: Path, architecture: str, labels: int, part: str
) -> None:
    assert part in problems_of([*scored, save(tmp_path / "other", architecture, labels)])


def test_a_groups_filter_and_remax_go_with_a_model_of_its_own_devices(scored: list[str]) -> None:
    filtered = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score"]
    for more in (filtered, ["algorithm.adv_estimator=remax"]):
        validate_config(compose_config([*scored, *OWN, *more]))


def test_the_place_of_the_reference_is_checked(files: list[str]) -> None:
    assert "actor_rollout_ref.ref.nnodes=0 must be at least 1" in problems_of([*files, *REF])
    on_three = ["actor_rollout_ref.ref.nnodes=1", "actor_rollout_ref.ref.n_gpus_per_node=3"]
    assert "3 ranks do not divide the 1024 rows" in problems_of([*files, *REF, *on_three])
    [notice] = validate_config(compose_config([*files, "actor_rollout_ref.ref.enable_resource_pool=true"]))
    assert "no KL asks for a reference" in notice


def test_ranks_of_a_reference_on_its_own_devices_may_share_rows(files: list[str]) -> None:
    sp = "ulysses_sequence_parallel_size"
    run = [*files, *REF, "trainer.n_gpus_per_node=2", "actor_rollout_ref.ref.nnodes=1"]
    four, one = "actor_rollout_ref.ref.n_gpus_per_node=4", "actor_rollout_ref.ref.n_gpus_per_node=1"
    validate_config(compose_config([*run, four, f"actor_rollout_ref.ref.{sp}=4"]))
    found = problems_of([*run, one, f"actor_rollout_ref.actor.{sp}=2"])
    assert f"ref.{sp}=2 does not divide the 1 ranks of the reference" in found
    validate_config(compose_config([*run, one, f"actor_rollout_ref.actor.{sp}=2", f"actor_rollout_ref.ref.{sp}=1"]))
    # 4 rows would not split over 6 ranks, but over 2 parts.
    small = ["actor_rollout_ref.actor.ppo_mini_batch_size=1", "actor_rollout_ref.ref.n_gpus_per_node=6"]
    validate_config(compose_config([*run, *small, f"actor_rollout_ref.ref.{sp}=3"]))
    assert "do not divide the 4 rows" in problems_of([*run, *small])


def test_a_model_that_is_named_but_not_asked_for_is_mentioned(files: list[str]) -> None:
    [notice] = validate_config(compose_config([*files, "reward.reward_model.model_path=/models/rm"]))
    assert "reward.reward_model.model_path=/models/rm: no model scores" in notice


def test_roles_are_mapped_to_pools(scored: list[str]) -> None:
    def pools(*more: str) -> dict[Role, list[int]]:
        manager = resource_pools(compose_config([*scored, "trainer.n_gpus_per_node=2", *more]))
        return {role: manager.resource_pool_spec[pool] for role, pool in manager.mapping.items()}

    assert pools() == {Role.ActorRollout: [2], Role.RewardModel: [2]}
    assert pools(*OWN, "reward.reward_model.n_gpus_per_node=1")[Role.RewardModel] == [1]
    assert pools("actor_rollout_ref.actor.use_kl_loss=true", "critic.enable=true") == {
        Role.ActorRolloutRef: [2],
        Role.Critic: [2],
        Role.RewardModel: [2],
    }
    apart = pools(*REF, "actor_rollout_ref.ref.nnodes=2", "actor_rollout_ref.ref.n_gpus_per_node=1")
    assert apart == {Role.ActorRollout: [2], Role.RefPolicy: [1, 1], Role.RewardModel: [2]}
