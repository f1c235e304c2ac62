"""Things that go wrong in a real run end it with a clear error, or mask the sample; no process stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlflow.observe.journal import read_lines
from rlflow.utils.errors import RewardError

REWARDS = {
    "raises": "raise ValueError('the answer cannot be parsed')",
    "hangs": "import time; time.sleep(3600)",
    "returns_text": "return 'one point'",
    "returns_nan": "return float('nan')",
    "exits": "import os; os._exit(3)",
}


def custom_reward(folder: Path, bodies: dict[int, str], modulo: int) -> str:
    """A function that does for a prompt what its index modulo `modulo` says; 1.0 where nothing is said."""
    path = folder / "custom.py"
    lines = ["def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kw):"]
    for index, body in bodies.items():
        lines += [f"    if extra_info['index'] % {modulo} == {index}:", f"        {body}"]
    path.write_text("\n".join([*lines, "    return 1.0", ""]))
    return f"reward.custom_reward_function.path={path}"


def processes_of_run(mark: str) -> list[str]:
    """Command lines of living processes that inherited the run's environment."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            if process.environ().get("RLFLOW_TEST_MARK") == mark:
                found.append(" ".join(process.info["cmdline"] or []))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.timeout(200)
def test_a_reward_that_fails_for_some_prompts_masks_their_samples_and_training_goes_on(
    run_trainer: Callable[..., Any],
    tiny_overrides: list[str],
    tmp_path: Path,
    read_metrics: Callable[[], list[dict[str, Any]]],
) -> None:
    run_trainer(
        [
            *tiny_overrides,
            custom_reward(tmp_path, {0: REWARDS["raises"], 1: REWARDS["hangs"], 2: REWARDS["returns_nan"]}, 8),
            "data.train_batch_size=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "trainer.total_training_steps=1",
            "reward.timeout_s=1",
        ]
    )
    [line] = read_metrics()
    assert line["data"]["training/reward/invalid"] == 9, "the three sessions of each of three prompts"
    assert line["data"]["critic/score/mean"] == 1.0, "the others all scored 1; an invalid one is no 0"


@pytest.mark.timeout(200)
def test_a_reward_that_never_works_ends_the_run_with_its_reason(
    run_trainer: Callable[..., Any], tiny_overrides: list[str], tmp_path: Path
) -> None:
    reward = custom_reward(tmp_path, {0: REWARDS["returns_text"], 1: REWARDS["exits"]}, 2)
    with pytest.raises(RewardError, match="All 24 samples of this step have an invalid reward"):
        run_trainer(
            [
                *tiny_overrides,
                reward,
                "data.train_batch_size=8",
                "actor_rollout_ref.actor.ppo_mini_batch_size=8",
                "reward.timeout_s=5",
            ]
        )
    fault, end = list(read_lines(tmp_path / "checkpoints" / "events.jsonl"))[-2:]
    assert (fault["event"], fault["what"]) == ("fault", "RewardError") and "invalid reward" in fault["text"]
    assert end["event"] == "run_ended" and end["exit_code"] == 1


@pytest.mark.timeout(200)
def test_a_malformed_row_ends_the_command_with_file_and_row_and_leaves_no_process(
    tmp_path: Path, tiny_overrides: list[str]
) -> None:
    rows = [{"prompt": [{"role": "user", "content": "1+1"}], "data_source": "x"}, {"prompt": None, "data_source": "x"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "broken.parquet")
    mark = str(tmp_path)
    broken = f"data.train_files={tmp_path}/broken.parquet"
    result = subprocess.run(
        [sys.executable, "-m", "rlflow.trainer.main_ppo", *tiny_overrides, broken],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | {"RLFLOW_TEST_MARK": mark},
    )
    assert result.returncode == 1
    assert "broken.parquet" in result.stderr and "row 1" in result.stderr
    deadline = time.monotonic() + 20
    while processes_of_run(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of_run(mark) == []
