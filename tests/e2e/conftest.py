"""A whole run on the tiny model: data, configuration, trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlflow.utils.import_utils import load_module

REWARD = """
import json, os

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    # Something a random model gets sometimes: the answer's length decides.
    return {"score": float(len(solution_str) % 2), "acc": float(len(solution_str) % 2)}
"""


def write_prompts(path: Path, count: int) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{number}+{number}"}],
            "data_source": "tiny/sums",
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
            "extra_info": {"split": "train", "index": number},
        }
        for number in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture
def tiny_overrides(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    """Command-line overrides of a short run on one process."""
    write_prompts(tmp_path / "train.parquet", 8)
    write_prompts(tmp_path / "val.parquet", 3)
    (tmp_path / "reward.py").write_text(REWARD)
    return [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/val.parquet",
        f"actor_rollout_ref.model.path={tiny_model_dir}",
        f"reward.custom_reward_function.path={tmp_path}/reward.py",
        f"trainer.default_local_dir={tmp_path}/checkpoints",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=[file]",
        "trainer.project_name=tiny",
        "trainer.experiment_name=run",
        "trainer.total_training_steps=2",
        "trainer.stall_timeout_s=120",
        "trainer.plots=false",
        "trainer.val_before_train=false",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=2",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        "data.seed=3",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    ]


@pytest.fixture
def run_trainer(ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`run(overrides, trainer_cls)` runs the task runner in this process and returns it."""
    from rlflow.config.checks import validate_config
    from rlflow.config.overrides import compose_config
    from rlflow.observe.feed import current_feed
    from rlflow.trainer.ppo import trainer_base
    from rlflow.trainer.task_runner import TaskRunner

    monkeypatch.setenv("RLFLOW_FILE_LOGGER_ROOT", str(tmp_path))

    def run(overrides: list[str], trainer_cls: type | None = None) -> TaskRunner:
        config = compose_config(overrides)
        validate_config(config)
        if trainer_cls is not None:
            monkeypatch.setitem(trainer_base._TRAINERS, "sync", trainer_cls)
        runner = TaskRunner()
        runner.run(config)
        assert current_feed() is None, "notices after a run go to the log again"
        return runner

    # The built-in trainer registers itself on import; do that before a test replaces it.
    trainer_base.get_trainer_cls("sync")
    yield run


@pytest.fixture
def read_metrics(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """`read()`: the numbers of the run; each of them has an entry in docs/metrics.md."""
    pages = load_module(str(Path(__file__).resolve().parents[1] / "docs" / "pages.py"))

    def read() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (tmp_path / "tiny" / "run.jsonl").read_text().splitlines()]
        assert pages.undocumented_metrics(name for line in lines for name in line["data"]) == []
        return lines

    return read
