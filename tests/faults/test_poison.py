"""Poison from outside: model text that attacks the scorers, data that hides in rows, secrets that want to get out."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlflow.reward_loop.pool import ScorerPool
from rlflow.reward_loop.result import InvalidRewardError
from rlflow.reward_loop.scorer import ScorerSpec

TIMEOUT_S = 5.0
SOURCES = {
    "openai/gsm8k": ("72", {}),
    "reasoning_gym/countdown": ("5*5", {"metadata": '{"numbers": [5, 5], "target": 25}'}),
    "reasoning_gym/chain_sum": ("7", {"metadata": "{}"}),
}


def poisons(trap: Path) -> dict[str, str]:
    attack = f"__import__('os').system('touch {trap}')"
    big = 1_000_000
    return {
        "import": f"#### {attack}",
        "import in a box": f"\\boxed{{{attack}}}",
        "attribute walk": "#### ().__class__.__bases__[0].__subclasses__()",
        "power tower": "#### 9**9**9**9\n\\boxed{9**9**9**9}\n<answer>9**9**9**9</answer>",
        "huge exponent": "#### 1e999999999",
        "digits": "#### " + "9" * big,
        "braces": "{" * big,
        "boxes": "\\boxed{" * (big // 7),
        "parentheses": "#### " + "(" * big,
        "backtracking": "#### " + "1," * (big // 2) + "x",
        "hashes": "####" * (big // 4),
        "NUL": "#### 7\x002 \x00",
        "surrogate": "#### 72 \ud800",
        "bidi and separators": "#### \u202e27\u2028 ",
        "template": "#### {0.__class__} %s %n ${x} {{7*7}}",
        "pickle": "#### cos\nsystem\n(S'touch " + str(trap) + "'\ntR.",
        "empty": "",
    }


def test_no_text_of_a_model_runs_hangs_or_breaks_a_built_in_scorer(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"

    async def score_all() -> dict[tuple[str, str], Any]:
        pool = ScorerPool(ScorerSpec(), TIMEOUT_S, 2)
        await pool.start()
        results: dict[tuple[str, str], Any] = {}

        async def score(source: str, name: str, text: str) -> None:
            truth, info = SOURCES[source]
            try:
                results[source, name] = await pool.call(
                    data_source=source, solution_str=text, ground_truth=truth, extra_info=dict(info)
                )
            except InvalidRewardError as error:
                results[source, name] = error

        try:
            await asyncio.gather(*(score(s, name, text) for s in SOURCES for name, text in poisons(trap).items()))
        finally:
            await pool.close()
        return results

    started = time.monotonic()
    results = asyncio.run(score_all())
    assert time.monotonic() - started < 60
    assert len(results) == len(SOURCES) * len(poisons(trap))
    assert not trap.exists()
    for place, result in results.items():
        if isinstance(result, InvalidRewardError):
            assert len(str(result)) < 2000, place
        else:
            score = result["score"] if isinstance(result, dict) else result
            assert 0.0 <= score <= 1.0, place
    assert not isinstance(results["openai/gsm8k", "surrogate"], InvalidRewardError), "an odd character is no reason"


REWARD = """
import os, sys

def compute_score(data_source, solution_str, ground_truth, extra_info=None, api_key=None, judge=None, **kwargs):
    print("asking the judge with", api_key, flush=True)
    if extra_info["index"] % 2:
        raise RuntimeError(f"401 from {judge}: key {api_key} is not valid for {os.environ['JUDGE_TOKEN']}")
    return float(len(solution_str) % 2)
"""
CANARIES = {"key": "canary-key-1f6b3c", "url": "canary-url-9d2e7a", "env": "canary-env-4c8a55"}


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """For a Ray of its own, whose logs are searched too. Short: the paths of its sockets are limited to 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="rlf", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(200)
def test_a_secret_is_in_no_file_and_on_no_terminal(
    launch: Callable[..., Any], tiny_overrides: list[str], tmp_path: Path, ray_folder: Path
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    overrides = [
        *tiny_overrides,
        f"+reward.custom_reward_function.reward_kwargs.api_key={CANARIES['key']}",
        f"+reward.custom_reward_function.reward_kwargs.judge=http://me:{CANARIES['url']}@localhost:1/v1",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.logger=[console,file]",
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
        "trainer.test_freq=1",
        "trainer.log_val_generations=3",
        f"trainer.rollout_data_dir={tmp_path}/rollouts",
        f"trainer.validation_data_dir={tmp_path}/validations",
        f"+ray_kwargs.ray_init._temp_dir={ray_folder}",
    ]
    env = {
        "JUDGE_TOKEN": CANARIES["env"],
        "RLFLOW_LOGGING_LEVEL": "DEBUG",
        "RLFLOW_FILE_LOGGER_ROOT": str(tmp_path),
        "RAY_DEDUP_LOGS": "0",
    }
    run = launch(overrides, env)
    assert run.process.wait(timeout=180) == 0, run.log.read_text()
    log = run.log.read_text()
    assert "asking the judge with ***" in log and "http://***@localhost:1/v1: key *** is not valid for ***" in log
    config = (run.run_folder / "config.yaml").read_text()
    assert "api_key: '***'" in config and "judge: http://***@localhost:1/v1" in config
    assert any("401 from" in path.read_text() for path in (run.run_folder / "trajectories").glob("*.jsonl"))
    outputs = [path for folder in (tmp_path, ray_folder) for path in folder.rglob("*") if path.is_file()]
    assert len(outputs) > 30
    leaks = [
        f"{name} in {path}"
        for path in outputs
        for name, value in CANARIES.items()
        if value.encode() in path.read_bytes()
    ]
    assert not leaks, "\n".join(leaks)
