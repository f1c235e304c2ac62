"""Shell recipes: their names and shape, that every key of theirs exists, and that the tiny ones run to their end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlflow.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
BACKENDS = ("fsdp", "fsdp2", "megatron", "megatron_lite", "mindspeed", "automodel", "veomni")
RECIPES = sorted(EXAMPLES.glob("*/*.sh"))
TINY = [path for path in RECIPES if path.name.startswith("run_tiny_")]
NAME = re.compile(rf"run_[a-z0-9]+(_[a-z0-9]+)*_({'|'.join(BACKENDS)})\.sh")


def label(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


# Stands in for python3 on PATH: writes down what it is asked to run, and runs nothing.
RECORDER = """#!/bin/sh
printf '%s\\n' "$@" >>"$RECORD"
printf '%s\\n' "--end--" >>"$RECORD"
"""


def run_script(script: Path, *args: str, path_first: Path, timeout: float, **env: object) -> tuple[int, str]:
    """Run a recipe with `path_first` before everything else on PATH, so that its `python3` is ours."""
    variables = {"PATH": f"{path_first}:{os.environ['PATH']}", **{name: str(value) for name, value in env.items()}}
    process = subprocess.Popen(
        ["bash", str(script), *args],
        env={**os.environ, **{name: value for name, value in variables.items() if value}},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # the shell and what it started; a run ends in order on SIGTERM
        output, _ = process.communicate(timeout=60)
        output += f"\n{script} was stopped after {timeout} s"
    return process.returncode, output


every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=label)

# --- names and shape ---


def test_there_are_recipes():
    algorithms = {"grpo", "ppo", "dapo", "gspo", "rloo", "remax"}
    own = {"custom_reward", "custom_estimator", "rollout_correction", "reward_model"}
    assert {path.parent.name for path in TINY} == {f"{name}_trainer" for name in algorithms} | own
    for folder in ("grpo_trainer", "ppo_trainer"):
        models = {path.stem for path in RECIPES if path.parent.name == folder}
        assert {"run_tiny_fsdp", "run_smollm2_135m_fsdp", "run_qwen2_5_0_5b_fsdp", "run_qwen3_8b_fsdp"} <= models


@every_recipe
def test_the_name_says_model_and_backend(recipe):
    assert NAME.fullmatch(recipe.name), "recipes are called run_<model>_<backend>.sh, lower case, nothing after it"
    assert recipe.stat().st_mode & 0o111, "recipes are executable"


@every_recipe
def test_the_shape_is_that_of_all_recipes(recipe):
    lines = recipe.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert re.fullmatch(r"# [^|]+ \| [^|]+ \| FSDP \| [^|]+", lines[1]), "algorithm | model | backend | hardware"
    code = [line for line in lines if not line.startswith("#")]
    assert code[0] == "set -xeuo pipefail"
    assert lines[-1].endswith('"$@"'), "what the user adds comes last and wins"
    assert f"bash examples/{recipe.parent.name}/{recipe.name}" in recipe.read_text()
    knobs = re.findall(r"^([A-Z_]+)=\$\{([A-Z_]+):-", recipe.read_text(), re.M)
    assert {name for name, _ in knobs} >= {"MODEL_PATH", "DATA_DIR", "DEVICE", "INFER_BACKEND", "TRAIN_BATCH_SIZE"}
    assert all(name == variable for name, variable in knobs)
    unused = [name for name, _ in knobs if f"${{{name}}}" not in "\n".join(code)]
    assert not unused, "a knob that turns nothing"


@pytest.mark.parametrize("recipe", [path for path in RECIPES if "qwen" in path.name], ids=label)
def test_what_nobody_ran_says_so(recipe):
    assert "Written, never run" in recipe.read_text().split("set -xeuo")[0]


def test_every_recipe_is_in_the_index():
    index = (EXAMPLES / "README.md").read_text()
    missing = [label(path) for path in RECIPES if f"({path.relative_to(EXAMPLES)})" not in index]
    assert not missing
    links = re.findall(r"\]\(([^)#]+)\)", index)
    assert all((EXAMPLES / link).exists() for link in links if "://" not in link)


# --- keys and numbers ---


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., list[list[str]]]:
    """`recorded(script, *args, **env)` -> the commands (without `python3`) that the recipe would run."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3").write_text(RECORDER)
    (folder / "python3").chmod(0o755)

    def record(script: Path, *args: str, **env: object) -> list[list[str]]:
        output = tmp_path / f"commands_{len(list(tmp_path.iterdir()))}"
        code, text = run_script(script, *args, path_first=folder, timeout=30, RECORD=output, **env)
        assert code == 0, text
        return [part.splitlines() for part in output.read_text().split("--end--\n") if part]

    return record


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RLFLOW_DATA with the tiny model and the sums, made by the scripts that the recipes call."""
    root = tmp_path_factory.mktemp("rlflow_data")
    for script, *options in (
        ("models/make_tiny.py", "--out", root / "models" / "tiny"),
        ("models/make_tiny.py", "--reward", "--out", root / "models" / "tiny-reward"),
        ("data_preprocess/sums.py", "--local_save_dir", root / "data" / "sums"),
    ):
        command = [sys.executable, str(EXAMPLES / script), *map(str, options)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    folder = root / "data" / "many"  # as many prompts as the larger recipes take in a step
    folder.mkdir()
    for name in ("train", "test"):
        pq.write_table(pa.table({"prompt": ["1 + 1 ="] * 2048}), folder / f"{name}.parquet")
    return root


def overrides_of(
    recipe: Path, recorded: Callable[..., list[list[str]]], data: Path, *args: str, **knobs: object
) -> list[str]:
    """The overrides that a recipe hands to the trainer; its model and data are there already."""
    rows = data / "data" / ("many" if "qwen" in recipe.name else "sums")
    env = {"RLFLOW_DATA": data, "MODEL_PATH": data / "models" / "tiny", "DATA_DIR": rows, **knobs}
    [command] = recorded(recipe, *args, **env)
    assert command[:2] == ["-m", "rlflow.trainer.main_ppo"]
    return command[2:]


def check(overrides: list[str]) -> Any:
    from rlflow.config.checks import validate_config
    from rlflow.config.overrides import compose_config

    config = compose_config(overrides)
    validate_config(config)
    return config


@every_recipe
def test_every_key_exists_and_the_numbers_fit(recipe, recorded, tiny_data):
    config = check(overrides_of(recipe, recorded, tiny_data))
    assert config.trainer.device == ("cuda" if "qwen" in recipe.name else "cpu")
    estimators = {"ppo": "gae", "custom_estimator": "group_median"}
    estimators |= {name: name for name in ("rloo", "remax", "reinforce_plus_plus")}
    assert config.algorithm.adv_estimator == estimators.get(recipe.parent.name.removesuffix("_trainer"), "grpo")


def test_the_algorithms_switch_on_what_they_are_named_after(recorded, tiny_data):
    def options(name: str, **env: object) -> Any:
        return check(overrides_of(EXAMPLES / name / "run_tiny_fsdp.sh", recorded, tiny_data, **env))

    dapo = options("dapo_trainer")
    assert dapo.algorithm.filter_groups.enable and dapo.reward.reward_kwargs.overlong_buffer_cfg.len == 2
    assert options("gspo_trainer").actor_rollout_ref.actor.policy_loss.loss_mode == "gspo"
    assert options("rollout_correction").algorithm.rollout_correction.rollout_rs_threshold == "0.9_1.1"
    assert options("rollout_correction", BYPASS="true").algorithm.rollout_correction.bypass_mode is True


def test_an_unknown_key_of_a_recipe_is_found(tmp_path, recorded, tiny_data):
    text = (EXAMPLES / "grpo_trainer" / "run_tiny_fsdp.sh").read_text()
    broken = tmp_path / "run_broken_fsdp.sh"
    broken.write_text(text.replace("EXTRA=(", "EXTRA=(\n    actor_rollout_ref.rollout.gpu_memory_utilisation=0.5"))
    with pytest.raises(ConfigError, match="gpu_memory_utilisation is not a key"):
        check(overrides_of(broken, recorded, tiny_data))


def test_what_the_user_adds_wins(recorded, tiny_data):
    recipe = EXAMPLES / "grpo_trainer" / "run_qwen3_8b_fsdp.sh"
    config = check(overrides_of(recipe, recorded, tiny_data, "trainer.n_gpus_per_node=4", "data.train_batch_size=512"))
    assert (config.trainer.n_gpus_per_node, config.data.train_batch_size) == (4, 512)
    assert config.actor_rollout_ref.actor.kl_loss_type == "low_var_kl"


def test_a_recipe_makes_its_model_and_data_once(recorded, tmp_path, tiny_data):
    recipe = EXAMPLES / "grpo_trainer" / "run_tiny_fsdp.sh"
    made = recorded(recipe, RLFLOW_DATA=tmp_path / "empty")
    assert [Path(command[0]).name for command in made[:2]] == ["make_tiny.py", "sums.py"] and len(made) == 3
    assert len(recorded(recipe, RLFLOW_DATA=tiny_data)) == 1


# --- the eight that users of verl bring ---


def knobs(**more: object) -> dict[str, object]:
    """What makes a recipe for GPUs one for two cores."""
    sizes = {"TRAIN_BATCH_SIZE": 4, "PPO_MINI_BATCH_SIZE": 4, "ROLLOUT_N": 2, "MAX_PROMPT_LENGTH": 64}
    return {"DEVICE": "cpu", "NGPUS_PER_NODE": 1, **sizes, "MAX_RESPONSE_LENGTH": 8, "MAX_TOKENS_PER_GPU": 512, **more}


# recipe -> its knobs on the CPU, and a number that only its algorithm reports.
EIGHT: dict[str, tuple[dict[str, object], str]] = {
    "grpo_trainer/run_qwen3_8b_fsdp": (knobs(), "actor/kl_loss"),
    "ppo_trainer/run_qwen3_8b_fsdp": (knobs(), "critic/vf_loss"),
    "dapo_trainer/run_qwen2_5_7b_fsdp": (knobs(OVERLONG_BUFFER=4, MAX_GEN_BATCHES=20), "actor/grad_norm"),
    "gspo_trainer/run_qwen3_8b_fsdp": (knobs(), "actor/pg_clipfrac"),
    "reinforce_plus_plus_trainer/run_qwen3_8b_fsdp": (knobs(), "actor/grad_norm"),
    "rloo_trainer/run_qwen3_8b_fsdp": (knobs(), "actor/reward_kl_penalty"),
    "lora_trainer/run_qwen3_8b_fsdp": (knobs(LORA_RANK=4, ACTOR_LR="1e-3"), "actor/kl_loss"),
    "long_context_trainer/run_qwen3_8b_fsdp": (
        knobs(NGPUS_PER_NODE=2, SP_SIZE=2, MAX_TOKENS_PER_GPU=64),
        "actor/grad_norm",
    ),
}
# Those that no other default test covers by its algorithm; the others take minutes more.
QUICK = ("dapo_trainer/run_qwen2_5_7b_fsdp", "reinforce_plus_plus_trainer/run_qwen3_8b_fsdp")
the_eight = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EIGHT]
)


@pytest.mark.parametrize("name", EIGHT)
def test_the_eight_plan_cleanly(name, recorded, tiny_data):
    from rlflow.trainer.plan import make_plan

    plan = make_plan(overrides_of(EXAMPLES / f"{name}.sh", recorded, tiny_data))
    actor = plan.batches.models["actor"]
    assert actor.optimizer_steps * actor.mini_batch_prompts == plan.batches.prompts
    assert plan.memory.devices and not plan.memory.unknown
    assert plan.stages[0].stage == "gen" and plan.stages[-1].stage == "update_actor"
    biased = [notice for notice in plan.notices if "biased" in notice or "no effect" in notice]
    assert not biased


@the_eight
def test_the_eight_train_two_steps_of_a_tiny_model(name, recorded, tiny_data, ray_cluster, tmp_path, monkeypatch):
    from rlflow.config.checks import validate_config
    from rlflow.config.overrides import compose_config
    from rlflow.trainer.task_runner import TaskRunner

    settings, metric = EIGHT[name]
    more = [
        "trainer.logger=[file]",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.plots=false",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        f"trainer.default_local_dir={tmp_path}/run",
        f"reward.custom_reward_function.path={EXAMPLES}/custom_reward/sums.py",
        "reward.num_workers=1",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    ]
    rows = {"DATA_DIR": tiny_data / "data" / "sums"}
    overrides = overrides_of(EXAMPLES / f"{name}.sh", recorded, tiny_data, *more, **rows, **settings)
    monkeypatch.setenv("RLFLOW_FILE_LOGGER_ROOT", str(tmp_path))
    config = compose_config(overrides)
    validate_config(config)
    assert TaskRunner().run(config) == {"global_steps": 2}
    steps = [json.loads(line)["data"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2 and all(metric in step and step["actor/grad_norm"] >= 0 for step in steps)


# --- whole runs ---


# Each recipe's folder, and the steps that its test wants to see. The first lane runs on the session's Ray, the second
# on Rays of its own, as in a user's shell: two runs at a time on one Ray would share a table.
LANES = ({"grpo_trainer": 2, "custom_estimator": 1}, {"ppo_trainer": 2, "custom_reward": 1})


@pytest.fixture(scope="module")
def whole_runs(
    ray_cluster: None, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Any]]]:
    """Every run_tiny_fsdp.sh, two at a time: a run spends half its time waiting for its parts."""
    import ray

    addresses = (ray.get_runtime_context().gcs_address, "")
    root = tmp_path_factory.mktemp("recipe_runs")

    def run(address: str, name: str, steps: int) -> tuple[tuple[int, str], Path]:
        env = {"RAY_ADDRESS": address, "RLFLOW_DATA": tiny_data, "RUN_DIR": root / name, "TOTAL_STEPS": steps}
        script = EXAMPLES / name / "run_tiny_fsdp.sh"
        return run_script(script, path_first=Path(sys.prefix) / "bin", timeout=200, **env), root / name

    pools = [ThreadPoolExecutor(max_workers=1) for _ in LANES]
    yield {
        name: pool.submit(run, address, name, steps)
        for pool, address, lane in zip(pools, addresses, LANES, strict=True)
        for name, steps in lane.items()
    }
    for pool in pools:
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def finished_run(whole_runs: dict[str, Future[Any]]) -> Callable[[str], tuple[Path, list[dict[str, Any]]]]:
    """`finished_run(folder)` -> the run folder of its recipe, and its metrics, a dict a step."""

    def wait(name: str) -> tuple[Path, list[dict[str, Any]]]:
        (code, output), folder = whole_runs[name].result(timeout=420)
        assert code == 0, output[-6000:]
        return folder, [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return wait


waits_for_runs = pytest.mark.timeout(440)


@waits_for_runs
def test_grpo_runs_and_its_checkpoint_merges(finished_run, tmp_path):
    from rlflow.cli.main import main

    folder, lines = finished_run("grpo_trainer")
    assert len(lines) == 3  # validation before, two steps
    assert all(line["actor/grad_norm"] > 0 for line in lines[1:])
    assert "val-core/sums/acc/mean@1" in set(lines[0]) & set(lines[2])
    assert main(["merge", str(folder), "--out", str(tmp_path / "merged"), "--verify"]) == 0


@waits_for_runs
def test_ppo_trains_actor_and_critic(finished_run, tmp_path):
    from rlflow.cli.main import main

    folder, [_, first, second] = finished_run("ppo_trainer")
    for line in (first, second):
        assert line["actor/grad_norm"] > 0 and line["critic/grad_norm"] > 0
    assert "critic/vf_loss" in second
    merge = ["merge", str(folder), "--role", "critic", "--verify", "--out", str(tmp_path / "merged")]
    assert main(merge) == 0


@waits_for_runs
def test_the_extras_of_a_custom_reward_become_metrics(finished_run):
    _, [before, step] = finished_run("custom_reward")
    for line in (before, step):
        assert 0 < line["val-aux/sums/digits/mean@1"] < 1
    assert step["critic/score/max"] > 0


@waits_for_runs
def test_a_custom_estimator_runs_from_its_file(finished_run):
    _, [_, step] = finished_run("custom_estimator")
    assert step["critic/advantages/min"] <= 0 < step["critic/advantages/max"]
    assert step["actor/grad_norm"] > 0
