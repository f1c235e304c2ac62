"""The main job with SGLang as its rollout engine, on the CPU."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_the_main_job_trains_on_what_sglang_samples(tiny_overrides, run_trainer, read_metrics):
    """Two steps; after each sync the engine's log-probs are those of the actor, so the ratios start at one."""
    run_trainer(
        [
            *tiny_overrides,
            "actor_rollout_ref.rollout.name=sglang",
            "actor_rollout_ref.rollout.max_num_seqs=8",
            "trainer.stall_timeout_s=300",
        ]
    )
    name = "training/rollout_probs_diff_max"
    differences = [line["data"][name] for line in read_metrics() if name in line["data"]]
    assert len(differences) == 2 and max(differences) < 1e-3
