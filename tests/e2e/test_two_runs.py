"""Two runs share a Ray cluster and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlflow.utils.ray_utils import ray_get


@pytest.mark.timeout(240)
def test_runs_on_one_cluster_have_a_table_each(ray_cluster: None, tiny_overrides: list[str], tmp_path: Path) -> None:
    import ray

    from rlflow.config.checks import validate_config
    from rlflow.config.overrides import compose_config
    from rlflow.trainer.task_runner import TaskRunner

    folders = [tmp_path / "one", tmp_path / "two"]
    runners, done = [], []
    for folder in folders:
        config = compose_config([*tiny_overrides, f"trainer.default_local_dir={folder}", "trainer.logger=[console]"])
        validate_config(config)
        runners.append(ray.remote(TaskRunner).options(num_cpus=0, max_concurrency=4).remote())
        done.append(runners[-1].run.remote(config))
    assert ray_get(done, what="two runs at once", timeout_s=200) == [{"global_steps": 2}] * 2
    for folder in folders:
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        trained = [uid for event in events if event["event"] == "trained" for uid in event["uids"]]
        # Both runs have prompts of the same names; each trained every one of its own exactly once.
        assert len(trained) == len(set(trained)) == 4
        assert {event["rows"] for event in events if event["event"] == "trained"} == {6}
    spaces = {
        line for folder in folders for line in (folder / "config.yaml").read_text().splitlines() if "namespace:" in line
    }
    assert len(spaces) == 2, spaces
