"""Scorers for tasks of the reasoning-gym package; `data_source` is `reasoning_gym/<task>`.

Two modes, chosen by the keyword `scorer`, else by `extra_info["scorer"]`, else "score_answer":

    score_answer   the task's own matcher. It gets the text inside the last <answer>..</answer>, or the whole text.
    last_number    1.0 when the last number of the text equals the ground truth, else 0.0. Lenient about words around
                   the number, so that a small model has something to learn from at its first step.

The task's matcher needs the entry that the question was made from: `extra_info["entry"]` (a dict, or its JSON text), or
`extra_info["metadata"]` plus the ground truth. Many tasks need the answer only.

Some tasks evaluate the answer text as Python (`eval`, sympy's parser). Those are refused in mode score_answer: a
scorer runs on model text, and nothing here is a sandbox.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any

MODES = ("score_answer", "last_number")
PREFIX = "reasoning_gym/"

# A minus belongs to the number unless it stands behind a digit, letter or bracket ("10-3" ends in 3, "= -3" in -3).
# A comma belongs to it between groups of three digits only ("1,000", but "1,2" ends in 2).
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_EVALUATES = re.compile(r"(?<!literal_)\beval\(|\bexec\(|\bparse_expr\(|\bsympify\(|\bsympy\.|\bsp\.")
_MAX_NUMBER_CHARS = 1000


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    scorer: str | None = None,
) -> float:
    """Score in [0, 1].

    Raises:
        ValueError: an unknown mode or task, or a ground truth that is no number in mode last_number.
        NotImplementedError: the task would evaluate the answer as code.
    """
    info = extra_info or {}
    mode = scorer or info.get("scorer") or "score_answer"
    if mode == "last_number":
        return last_number_score(solution_str, ground_truth)
    if mode != "score_answer":
        raise ValueError(f"reasoning_gym scorer={mode!r} is unknown; use one of {', '.join(MODES)}")
    matcher = _matcher(data_source.removeprefix(PREFIX))
    return float(matcher(extract_answer(solution_str), _entry(ground_truth, info)))


def last_number_score(solution_str: str, ground_truth: Any) -> float:
    """1.0 when the last number of the text has the value of `ground_truth`, else 0.0 (also without any number)."""
    expected = _decimal(str(ground_truth))
    if expected is None:
        raise ValueError(f"scorer=last_number needs a number as ground truth, got {ground_truth!r}")
    numbers = _NUMBER.findall(solution_str.replace("\u2212", "-"))
    return 1.0 if numbers and _decimal(numbers[-1]) == expected else 0.0


def extract_answer(text: str) -> str:
    """The text inside the last <answer> tag, else all of it; blanks around it dropped."""
    tagged = _ANSWER_TAG.findall(text)
    return (tagged[-1] if tagged else text).strip()


def _decimal(text: str) -> Decimal | None:
    text = text.strip().replace(",", "")
    if len(text) > _MAX_NUMBER_CHARS:
        return None
    try:
        value = Decimal(text)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def _entry(ground_truth: Any, info: dict[str, Any]) -> dict[str, Any]:
    entry = _maybe_json(info.get("entry"))
    if isinstance(entry, dict):
        return entry
    answer = None if ground_truth is None else str(ground_truth)
    metadata = _maybe_json(info.get("metadata"))
    return {"question": info.get("question"), "answer": answer, "metadata": metadata or {}}


def _maybe_json(value: Any) -> Any:
    # Parquet files often carry nested objects of varying keys as JSON text.
    return json.loads(value) if isinstance(value, str) else value


@cache
def _matcher(task: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if task not in DATASETS:
        raise ValueError(f"reasoning_gym has no task {task!r}; data_source must be {PREFIX}<task>")
    matcher = get_score_answer_fn(task)
    if _EVALUATES.search(inspect.getsource(matcher)):
        raise NotImplementedError(
            f"the reasoning_gym task {task!r} evaluates the answer text as Python, which is not done here. Set "
            'extra_info["scorer"]="last_number" where that fits, or write a custom reward function'
        )
    return matcher
