from __future__ import annotations

import asyncio
import functools
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlflow.reward_loop.scorer import get_custom_reward_fn, is_async, load_scorer, scorer_spec
from rlflow.utils.errors import ConfigError

SCORERS = Path(__file__).with_name("scorers.py")


def config(**custom):
    return OmegaConf.create({"reward": {"custom_reward_function": custom}})


def test_a_custom_function_gets_reward_kwargs_that_win(tmp_path):
    (tmp_path / "f.py").write_text(
        "def grade(data_source, solution_str, ground_truth, extra_info=None, k=1):\n    return k\n"
    )
    grade = get_custom_reward_fn(config(path=str(tmp_path / "f.py"), name="grade", reward_kwargs={"k": 5}))
    assert grade(data_source="s", solution_str="", ground_truth="", k=2) == 5


def test_coroutine_functions_stay_recognisable(tmp_path):
    (tmp_path / "g.py").write_text("async def compute_score(**kw):\n    return kw['k']\n")
    grade = get_custom_reward_fn(config(path=f"file://{tmp_path}/g.py", reward_kwargs={"k": 5}))
    assert is_async(grade) and asyncio.run(grade()) == 5
    assert is_async(functools.partial(grade, a=1)) and not is_async(functools.partial(print, 1))


def test_packages_by_name():
    spec = scorer_spec(config(path="pkg://rlflow.rewards.gsm8k"))
    assert load_scorer(spec)("#### 1", "1") == 1.0


def test_no_path_means_the_built_in_routing():
    assert get_custom_reward_fn(OmegaConf.create({})) is None
    assert get_custom_reward_fn(config(path=None, name="compute_score")) is None


def test_a_missing_file_is_named_with_what_lies_beside_it():
    with pytest.raises(ConfigError, match=r"scorer\.py is no file\. .*scorers\.py"):
        scorer_spec(config(path=str(SCORERS.with_name("scorer.py"))))


def test_a_missing_function_is_named_with_what_there_is():
    with pytest.raises(ConfigError, match="it defines compute_score, compute_score_async"):
        load_scorer(scorer_spec(config(path=str(SCORERS), name="grade")))


def test_a_relative_path_starts_at_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "h.py").write_text("def compute_score(**kw):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    assert scorer_spec(config(path="h.py")).path == str(tmp_path / "h.py")
