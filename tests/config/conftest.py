"""A command line that passes every check, for tests that add what does not."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Overrides of a run whose data and model folder exist."""
    for name in ("train.parquet", "val.parquet", "config.json"):
        (tmp_path / name).write_text("{}")
    return [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/val.parquet",
        f"actor_rollout_ref.model.path={tmp_path}",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "trainer.logger=[console,file]",
    ]
