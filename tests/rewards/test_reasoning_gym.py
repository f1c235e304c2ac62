from __future__ import annotations

import pytest

from rlflow.rewards import default_compute_score
from rlflow.rewards.reasoning_gym import extract_answer, last_number_score

reasoning_gym = pytest.importorskip("reasoning_gym")


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("4 - 1 - 7 = -4", "-4", 1.0),
        ("4 - 1 - 7 = \u22124.", "-4", 1.0),
        ("10-3", "3", 1.0),
        ("the sum is 1,000.50 dollars", "1000.5", 1.0),
        ("1,2", "2", 1.0),
        ("007", "7", 1.0),
        ("12 apples", "13", 0.0),
        ("none", "13", 0.0),
        ("", "13", 0.0),
        ("9**9**9", "9", 1.0),
        ("5" * 100_000, "5", 0.0),
        ("\x00 7 \ud800", 7, 1.0),
        ("{" * 1_000_000, "1", 0.0),
    ],
)
def test_last_number(text, truth, score):
    info = {"scorer": "last_number"}
    assert default_compute_score("reasoning_gym/chain_sum", text, truth, info) == score
    assert default_compute_score("reasoning_gym/chain_sum", text, truth, scorer="last_number") == score


def test_last_number_needs_a_number_to_compare_with():
    with pytest.raises(ValueError, match="ground truth"):
        last_number_score("7", "seven")


def test_the_answer_stands_in_the_last_tag_or_is_the_whole_text():
    assert extract_answer("<answer>1</answer> no, <answer> 2\n</answer>") == "2"
    assert extract_answer(" 3 \n") == "3"


def test_the_tasks_own_matcher_decides_by_default():
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    source = "reasoning_gym/chain_sum"
    right, info = f"<answer>{entry['answer']}</answer>", {"metadata": entry["metadata"]}
    assert default_compute_score(source, right, entry["answer"], info) == 1.0
    assert default_compute_score(source, right, entry["answer"], {"entry": dict(entry)}) == 1.0
    assert default_compute_score(source, "<answer>123456</answer>", entry["answer"], info) < 1.0


def test_a_matcher_that_evaluates_answers_as_code_is_refused():
    with pytest.raises(NotImplementedError, match="as Python"):
        default_compute_score("reasoning_gym/countdown", "__import__('os').abort()", "1", {})


def test_unknown_tasks_and_modes_are_refused():
    with pytest.raises(ValueError, match="no_such_task"):
        default_compute_score("reasoning_gym/no_such_task", "1", "1", {})
    with pytest.raises(ValueError, match="score_answer, last_number"):
        default_compute_score("reasoning_gym/chain_sum", "1", "1", {"scorer": "guess"})
