"""The same command twice: the same parameters, optimizer, numbers and trajectories, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import deterministic_runs as runs


@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_runs_of_one_command_are_equal(ray_cluster: None, tiny_model_dir: Path, tmp_path: Path, ranks: int) -> None:
    runs.write_inputs(tmp_path, prompts=8)
    options = [
        f"trainer.n_gpus_per_node={ranks}",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.shuffle=true",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
    ]
    folders = [tmp_path / "first", tmp_path / "second"]
    # At the same time: they fight for the cores, so that everything arrives at other times than in a run alone.
    runs.start(*([*runs.overrides(tmp_path, tiny_model_dir, folder), *options] for folder in folders))
    first, second = (runs.record(folder, 2) for folder in folders)
    assert runs.differences(first, second) == []
    # There was something to compare.
    assert {"metrics of step 1", "metrics of step 2", "rollouts 2.jsonl", "validation 2.jsonl"} <= first.keys()
    assert sum(name.endswith(".safetensors") for name in first) >= 2 * ranks
    numbers = first["metrics of step 2"]
    assert numbers["actor/grad_norm"] > 0 and numbers["training/rollout_log_probs_diff/max"] < 1e-4
    assert numbers["weight_sync/replicas"] == ranks
