"""GSM8K: the answer is a number after `####` (strict), or the last number of the text (flexible).

Only the last 300 characters are looked at: the answer stands at the end, and matching cost stays bounded for texts of
any length. Equality is that of strings, so `72.` is not `72`.
"""

from __future__ import annotations

import re

TAIL_CHARS = 300
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")
_NOT_NUMBERS = ("", ".")


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The answer as written in the text, or None when there is none.

    Raises:
        ValueError: `method` is neither "strict" nor "flexible".
    """
    tail = solution_str[-TAIL_CHARS:]
    if method == "strict":
        answers = _STRICT.findall(tail)
        return answers[-1].replace(",", "").replace("$", "") if answers else None
    if method == "flexible":
        numbers = [number for number in _NUMBER.findall(tail) if number not in _NOT_NUMBERS]
        return numbers[-1] if numbers else None
    raise ValueError(f"gsm8k method={method!r} is unknown; use strict or flexible")


def compute_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the right answer, `format_score` for a wrong one, 0 for none."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == ground_truth else format_score
