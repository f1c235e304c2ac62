"""The command line: what is wrong is said before Ray starts, in one go, with exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(*overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlflow.trainer.main_ppo", *overrides],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "RAY_ADDRESS": "127.0.0.1:1"},  # would fail at once if Ray were started
        check=False,
    )


def test_unknown_keys_and_syntax_end_the_run_with_hints() -> None:
    result = run("trainer.total_epoch=1", "data.train_batchsize=4", "nonsense")
    assert result.returncode == 2
    assert "trainer.total_epochs" in result.stderr and "data.train_batch_size" in result.stderr
    assert "'nonsense' is not an override" in result.stderr
    assert "Traceback" not in result.stderr


def test_impossible_values_end_the_run(tmp_path: Path) -> None:
    result = run(
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.name=hf",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={tmp_path}/missing.parquet",
        "data.train_batch_size=60",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
    )
    assert result.returncode == 2
    assert "missing.parquet: no such file" in result.stderr
    assert "ppo_mini_batch_size=15" in result.stderr
    assert "notice: device cpu" in result.stderr
    assert "Traceback" not in result.stderr
