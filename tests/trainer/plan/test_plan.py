"""The plan: numbers that follow from a command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlflow.trainer.main_ppo import main
from rlflow.trainer.plan import make_plan
from rlflow.trainer.plan.model_size import ModelSize, model_size
from rlflow.utils.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CANARY = "canary-5f3a9c1e77"
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A run of 8 processes on 1000 prompts."""
    for name in ("train", "val"):
        pq.write_table(pa.table({"prompt": ["a"] * 1000}), tmp_path / f"{name}.parquet")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    return [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/val.parquet",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.name=hf",
        f"{ROLLOUT}.n=5",
        f"{ACTOR}.use_dynamic_bsz=true",
        f"{ACTOR}.ppo_mini_batch_size=64",
        "data.train_batch_size=256",
        "trainer.logger=[file]",
    ]


def test_the_batch_table(command: list[str]) -> None:
    batches = make_plan([*command, f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{ACTOR}.ppo_epochs=3"]).batches
    assert (batches.prompts, batches.trajectories, batches.tokens) == (256, 1280, 1280 * 1024)
    actor = batches.models["actor"]
    assert (actor.dp_ranks, actor.sp_ranks, actor.rows_a_rank) == (4, 2, 320)
    assert (actor.mini_batch_rows, actor.mini_batch_rows_a_rank, actor.optimizer_steps) == (320, 80, 4 * 3)
    assert actor.micro_batches == 3  # 80 rows x 1024 tokens, 2 x 16384 a forward
    assert (batches.steps_an_epoch, batches.steps, batches.optimizer_steps) == (3, 90, 90 * 12)
    assert make_plan([*command, "trainer.total_training_steps=7"]).batches.optimizer_steps == 7 * 4


def test_changes_say_why(command: list[str]) -> None:
    changes = {change.key: change for change in make_plan([*command, "trainer.device=cpu"]).changes}
    assert changes[f"{ROLLOUT}.n"].origin == "command line" and changes[f"{ROLLOUT}.n"].default == 1
    assert changes[f"{ACTOR}.rollout_n"].origin == f"follows {ROLLOUT}.n (command line)"
    assert changes["trainer.n_gpus_per_node"].origin == "fitted to this machine"
    assert "algorithm.gamma" not in changes


def test_devices_that_are_missing_are_named(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.trainer.plan.placement.count_gpus", lambda: 3)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    plan = make_plan([*command, f"{ACTOR}.use_kl_loss=true", "actor_rollout_ref.ref.enable_resource_pool=true",
                      "actor_rollout_ref.ref.n_gpus_per_node=2", "actor_rollout_ref.ref.nnodes=1"])  # fmt: skip
    assert plan.placement.short_of == ["10 GPUs are needed on this machine, 3 found"]
    assert plan.placement.pools == {"global_pool": [8], "ref_pool": [2]}
    assert make_plan([*command, "trainer.n_gpus_per_node=2"]).placement.short_of == []


@pytest.mark.parametrize(
    ("more", "stages"),
    [
        ([], "gen old_log_prob adv update_actor"),
        ([f"{ACTOR}.use_kl_loss=true"], "gen old_log_prob ref adv update_actor"),
        (["algorithm.adv_estimator=gae", "CRITIC"], "gen old_log_prob values adv update_critic update_actor"),
        ([f"{ACTOR}.fuse_old_log_prob=true", f"{ACTOR}.ppo_mini_batch_size=256"], "gen adv update_actor"),
    ],
)
def test_the_stages_are_those_that_run(command: list[str], more: list[str], stages: str) -> None:
    path = command[2].partition("=")[2]
    plan = make_plan([*command, *(text.replace("CRITIC", f"critic.model.path={path}") for text in more)])
    assert [stage.stage for stage in plan.stages] == stages.split()


def test_memory_grows_with_what_it_depends_on(command: list[str]) -> None:
    def peaks(*more: str) -> dict[str, dict[str, int]]:
        few = ["data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4", "trainer.n_gpus_per_node=1"]
        plan = make_plan([*command, "trainer.device=cpu", *few, *more])
        return {device.name: device.peaks for device in plan.memory.devices}

    base = peaks()
    longer = peaks("data.max_response_length=1024")
    assert longer["trainer process"]["train"] > base["trainer process"]["train"]
    assert longer["rollout server"]["rollout"] > base["rollout server"]["rollout"]
    adapter = peaks("actor_rollout_ref.model.lora_rank=4")
    assert adapter["trainer process"]["weights"] < base["trainer process"]["weights"]
    kept = peaks("actor_rollout_ref.model.enable_gradient_checkpointing=false")
    assert kept["trainer process"]["train"] > base["trainer process"]["train"]


def test_parameters_are_counted_from_the_config(tiny_model_dir: Path) -> None:
    from safetensors import safe_open

    with safe_open(tiny_model_dir / "model.safetensors", "pt") as weights:
        counted = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118
    size = model_size(str(tiny_model_dir))
    assert size is not None and abs(size.parameters / counted - 1) < 0.01
    assert isinstance(model_size("Qwen/Qwen3-8B"), ModelSize) and model_size("nobody/nothing") is None
    known = model_size("Qwen/Qwen2.5-0.5B-Instruct")
    assert known is not None and round(known.parameters / 1e6) == 494


def test_the_main_job_prints_the_plan_and_starts_nothing(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # would fail at once if Ray were started
    assert main([*command, "--plan"]) == 0
    text = capsys.readouterr().out
    for heading in ("Changed from the defaults", "Batches", "Processes", "Memory a device", "Stages of a step"):
        assert f"{heading}\n---" in text
    assert main(["--plan", *command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batches"]["trajectories"] == 1280
    assert main(["--plan", *command, "trainer.total_epoch=3"]) == 2
    assert "did you mean trainer.total_epochs" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        make_plan(["trainer.total_epoch=3"])


@pytest.mark.parametrize(
    "flags", [["--plan"], ["--plan", "--json"], ["--plan", "trainer.n_gpus_per_node=0"], ["trainer.n_gpus_per_node=0"]]
)
def test_no_secret_is_printed(
    command: list[str], flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    secrets = [
        f"+reward.custom_reward_function.reward_kwargs.api_key={CANARY}",
        f"+my.service.password={CANARY}",
        f"trainer.experiment_name=run-{CANARY}",
        f"trainer.wandb_proxy=http://me:{CANARY}@host",
    ]
    code = main([*command, *secrets, *flags])
    captured = capsys.readouterr()
    assert CANARY not in captured.out + captured.err
    assert code == (2 if "trainer.n_gpus_per_node=0" in flags else 0) and (code or "***" in captured.out)


def test_the_plan_is_saved_beside_the_configuration(command: list[str], tmp_path: Path) -> None:
    from rlflow.config.overrides import compose_config
    from rlflow.trainer.plan.saved import save_plan_in_background

    config: Any = compose_config([*command, f"+reward.reward_kwargs.api_key={CANARY}"])
    save_plan_in_background(config, tmp_path).join(timeout=60)
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert saved["batches"]["prompts"] == 256
    texts = (tmp_path / "plan.txt").read_text() + json.dumps(saved)
    assert "trajectories a step" in texts and CANARY not in texts
