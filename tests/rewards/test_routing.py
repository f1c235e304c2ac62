from __future__ import annotations

import subprocess
import sys

import pytest

from rlflow.rewards import default_compute_score, get_default_compute_score


def test_an_unknown_source_names_itself_and_what_to_do():
    with pytest.raises(NotImplementedError, match=r"'my/data'.*openai/gsm8k.*custom_reward_function"):
        default_compute_score("my/data", "1", "1")


def test_scorer_options_pass_through():
    assert default_compute_score("openai/gsm8k", "is 72", "72", method="flexible", score=2.0) == 2.0


def test_every_manager_gets_the_same_default():
    assert get_default_compute_score("naive") is default_compute_score


def test_scorers_load_without_torch_and_ray():
    code = (
        "import sys, rlflow.rewards, rlflow.rewards.gsm8k, rlflow.reward_loop.child;"
        "print([m for m in ('torch', 'ray', 'transformers', 'omegaconf') if m in sys.modules]);"
        "import rlflow.reward_loop.worker, rlflow.reward_loop.manager, rlflow.reward_loop.reward_manager.naive;"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["[]", "[]"]
