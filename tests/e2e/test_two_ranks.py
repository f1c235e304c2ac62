"""The whole system on two worker processes with a replica each: rows are split, padded, trained and synced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.timeout(240)
def test_two_ranks_train_and_sync_both_replicas(
    run_trainer: Callable[..., Any], tiny_overrides: list[str], read_metrics: Callable[[], list[dict[str, Any]]]
) -> None:
    run_trainer(
        [
            *tiny_overrides,
            "trainer.n_gpus_per_node=2",
            "trainer.val_before_train=true",
            "trainer.test_freq=2",
            "actor_rollout_ref.rollout.val_kwargs.n=2",
            "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
            "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        ]
    )
    lines = read_metrics()
    assert [line["step"] for line in lines] == [0, 1, 2]
    first, second = lines[1]["data"], lines[2]["data"]
    assert first["weight_sync/replicas"] == 2
    assert second["training/rollout_log_probs_diff/max"] < 1e-4, "both replicas sampled from the updated weights"
    assert second["training/off_policy/trajectory_staleness/max"] == 0
    assert first["actor/grad_norm"] > 0
    assert {"val-core/tiny/sums/acc/mean@2", "val-core/tiny/sums/acc/best@2/mean"} <= set(lines[0]["data"])
    assert "val-core/tiny/sums/acc/mean@2" in second
