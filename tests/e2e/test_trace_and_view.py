"""`rlflow trace` and `rlflow view` on the folder of a real run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlflow.cli.main import main
from rlflow.observe.records import RunFolder


@pytest.mark.timeout(240)
def test_a_real_run_is_traced_and_viewed(
    run_trainer: Callable[..., Any], tiny_overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["trainer.val_before_train=true", "actor_rollout_ref.actor.use_kl_loss=true"]
    run_trainer([*tiny_overrides, *overrides])
    folder = tmp_path / "checkpoints"
    run = RunFolder(folder)
    journal = run.journal()
    assert journal.end is not None and journal.damaged == 0
    counts = journal.accounting("train")
    assert (counts.issued, counts.trained) == (4, 4)
    rows = run.trajectories(2, "train")
    assert len(rows) == 6
    for row in rows:
        length = len(row.response_ids)
        assert len(row.response_tokens) == len(row.response_mask) == length
        for name in ("rollout_log_probs", "old_log_probs", "ref_log_prob", "entropy", "advantages"):
            assert len(row.series[name]) == length, name

    capsys.readouterr()
    assert main(["trace", rows[0].key, "--run", str(folder), "--json"]) == 0
    trace = json.loads(capsys.readouterr().out)
    names = [state["name"] for state in trace["states"]]
    # A session may be seen to end before or after its neighbours; the rest has one order.
    assert sorted(names[:3]) == ["finished", "issued", "session"] and names[0] == "issued"
    assert names[3:] == ["sampled", "old_log_prob", "ref", "adv", "update_actor", "trained", "cleared"]
    fields = {item["name"]: item for item in trace["fields"]}
    assert fields["responses"]["writer"].startswith("agent_loop_worker_")
    assert fields["responses"]["version"] == 1
    assert fields["responses"]["next_reader"] == "old_log_prob"
    assert fields["old_log_probs"]["readers"][-1]["stage"] == "update_actor"
    assert fields["rm_scores"]["next_reader"] == "adv"
    assert fields["advantages"]["next_reader"] == "update_actor"
    for item in trace["fields"]:
        assert item["time"] is not None, item["name"]

    assert main(["trace", rows[0].uid, "--run", str(folder), "--width", "80"]) == 0
    assert rows[1].key in capsys.readouterr().out
    assert main(["view", str(folder)]) == 0
    page = (folder / "view" / "index.html").read_text()
    assert "The run is complete." in page
    assert "<dt>actor_rollout_ref.rollout.n</dt><dd><code>3</code></dd>" in page, "what the run changed is known"
    assert "<dt>actor_rollout_ref.rollout.top_p</dt>" not in page
