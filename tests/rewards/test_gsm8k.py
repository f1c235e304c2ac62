from __future__ import annotations

import pytest

from rlflow.rewards import default_compute_score, gsm8k


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("so #### 72", 1.0),
        ("#### 7", 0.0),
        ("72", 0.0),
        ("#### 1,000 #### 72", 1.0),
        ("#### 72.", 0.0),
        ("#### $72", 0.0),
        ("####72", 0.0),
    ],
)
def test_strict_takes_the_last_marked_number_and_compares_strings(text, score):
    assert gsm8k.compute_score(text, "72") == score
    assert default_compute_score("openai/gsm8k", text, "72") == score


@pytest.mark.parametrize(("text", "score"), [("the answer is 72", 1.0), ("72 apples.", 1.0), ("no", 0.0)])
def test_flexible_takes_the_last_number(text, score):
    assert gsm8k.compute_score(text, "72", method="flexible") == score


def test_commas_of_a_marked_number_do_not_count():
    assert gsm8k.compute_score("#### 1,000", "1000") == 1.0


def test_a_wrong_answer_is_worth_the_format_score_and_none_is_worth_nothing():
    assert gsm8k.compute_score("#### 5", "72", format_score=0.1) == 0.1
    assert gsm8k.compute_score("five", "72", format_score=0.1) == 0.0


def test_only_the_tail_of_a_long_text_is_read():
    assert gsm8k.compute_score("#### 72" + " " * 300, "72") == 0.0
    assert gsm8k.compute_score("{" * 1_000_000 + "#### 72", "72") == 1.0


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="strict or flexible"):
        gsm8k.compute_score("#### 72", "72", method="fuzzy")
