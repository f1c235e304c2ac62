"""`actor.fuse_old_log_prob`: one forward less a step, and the same run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SAME = (
    "actor/entropy",
    "actor/grad_norm",
    "actor/pg_loss",
    "training/rollout_probs_diff_mean",
    "rollout_corr/kl",
    "critic/score/mean",
    "response_length/mean",
)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(240)
def test_a_fused_run_is_the_run_with_a_log_prob_pass(
    run_trainer: Callable[..., Any], tiny_overrides: list[str], tmp_path: Path
) -> None:
    numbers, records = [], []
    for fuse in ("false", "true"):
        folder = tmp_path / f"fused_{fuse}"
        run_trainer(
            [
                *tiny_overrides,
                f"trainer.default_local_dir={folder}",
                f"actor_rollout_ref.actor.fuse_old_log_prob={fuse}",
                "actor_rollout_ref.rollout.full_determinism=true",
            ]
        )
        numbers.append([line["data"] for line in lines_of(folder / "metrics.jsonl")])
        records.append({row["key"]: row for row in lines_of(folder / "trajectories" / "2.jsonl")})
        stages = [e for e in lines_of(folder / "events.jsonl") if e["event"] == "stage" and e["step"] == 2]
        passes = [e["stage"] for e in stages if "old_log_probs" in e.get("writes", [])]
        assert passes == (["update_actor"] if fuse == "true" else ["old_log_prob"])
    for apart, fused in zip(*numbers, strict=True):
        assert {name: fused[name] for name in SAME} == pytest.approx({name: apart[name] for name in SAME}, rel=1e-3)
        assert "timing_s/old_log_prob" in apart and "timing_s/old_log_prob" not in fused
    apart_rows, fused_rows = records
    assert apart_rows.keys() == fused_rows.keys()
    for key, row in apart_rows.items():
        assert fused_rows[key]["response_ids"] == row["response_ids"], "the second step starts from equal weights"
        assert fused_rows[key]["old_log_probs"] == pytest.approx(row["old_log_probs"], abs=1e-4)
        assert fused_rows[key]["lineage"]["old_log_probs"]["writer"].startswith("update_actor")
