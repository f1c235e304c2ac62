"""What a configuration with adapters may not say, and what it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.config import HFModelConfig
from rlflow.config.checks import validate_config
from rlflow.config.overrides import compose_config
from rlflow.utils.errors import ConfigError

MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"


@pytest.fixture
def grpo(tmp_path: Path) -> list[str]:
    for name in ("train.parquet", "val.parquet"):
        (tmp_path / name).write_text("")
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    return [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/val.parquet",
        f"{MODEL}.path={tmp_path}/policy",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        f"{ACTOR}.use_dynamic_bsz=true",
        "trainer.logger=[console,file]",
    ]


def test_the_keys_of_the_reference_are_there(grpo: list[str]) -> None:
    config = compose_config(
        [*grpo, f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[q_proj,v_proj]", f"{MODEL}.exclude_modules=.*mlp.*"]
    )
    model = config.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.lora_adapter_path, model.lora.merge) == (8, 16, None, False)
    notices = validate_config(config)
    assert any("cannot serve an adapter" in line for line in notices)
    assert any("optim.lr=1e-06" in line for line in notices)
    quiet = validate_config(
        compose_config([*grpo, f"{MODEL}.lora_rank=8", f"{MODEL}.lora.merge=true", f"{ACTOR}.optim.lr=1e-4"])
    )
    assert quiet == validate_config(compose_config(grpo))


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ([f"{MODEL}.lora_rank=-2"], "lora_rank=-2"),
        ([f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[]"], "target_modules"),
        ([f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=7"], "target_modules"),
        ([f"{MODEL}.lora_adapter_path=/nowhere"], "no adapter_config.json"),
        ([f"{MODEL}.lora_rank=8", f"{MODEL}.lora_alpha=0"], "lora_alpha=16"),
        (
            [
                "algorithm.adv_estimator=gae",
                f"critic.model.path=${{{MODEL}.path}}",
                "critic.model.lora_adapter_path=/no",
            ],
            "critic.model.lora_adapter_path=/no",
        ),
    ],
)
def test_what_cannot_work_is_refused(grpo: list[str], overrides: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate_config(compose_config([*grpo, *overrides]))
    assert part in str(error.value)


def test_a_policy_that_is_its_own_reference_needs_no_sizes_for_one(grpo: list[str]) -> None:
    rows = [f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", f"{ACTOR}.use_kl_loss=true"]
    rows += ["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4"]
    with pytest.raises(ConfigError, match="ref.log_prob_micro_batch_size_per_gpu is not set"):
        validate_config(compose_config([*grpo, *rows]))
    validate_config(compose_config([*grpo, *rows, f"{MODEL}.lora_rank=8"]))


def test_keys_without_an_adapter_are_named(grpo: list[str]) -> None:
    notices = validate_config(compose_config([*grpo, f"{ACTOR}.checkpoint.save_lora_only=true"]))
    assert any("save_lora_only" in line for line in notices)


def test_an_adapter_is_used_with_a_rank_or_a_folder() -> None:
    assert not HFModelConfig().uses_lora
    assert HFModelConfig(lora_rank=1).uses_lora and HFModelConfig(lora_adapter_path="x").uses_lora
