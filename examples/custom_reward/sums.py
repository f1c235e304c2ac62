"""A reward of one's own for the sums of examples/data_preprocess/sums.py, in the three forms that rlflow takes.

    reward.custom_reward_function.path=examples/custom_reward/sums.py
    reward.custom_reward_function.name=compute_score | compute_score_async | compute_score_with_extras
    +reward.custom_reward_function.reward_kwargs.digit_bonus=0.1        # any keyword of the function

The function runs in a child process, with a deadline of reward.timeout_s for each call. One that raises, returns NaN or
never returns makes its sample invalid: it is left out of the update and counted in the metrics.

The score is 1 when the last number of the answer is right. A model that knows nothing would hardly ever see a 1, so
digits earn a part of `digit_bonus` as well: an answer that is all digits gets all of it.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any


def last_number(text: str) -> str | None:
    """The last run of digits, without leading zeros; None when there is none."""
    found = re.findall(r"[0-9]+", text)
    return (found[-1].lstrip("0") or "0") if found else None


def digit_share(text: str) -> float:
    """Digits among the characters, in [0, 1]; an empty text has none."""
    return sum(char in "0123456789" for char in text) / max(1, len(text))


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    digit_bonus: float = 0.2,
) -> float:
    """A number: the plainest form.

    Args:
        data_source: the row's column of that name.
        solution_str: the decoded response.
        ground_truth: `reward_model["ground_truth"]` of the row.
        extra_info: the row's column of that name, and what the agent loop added.
        digit_bonus: from `reward_kwargs`.
    """
    if last_number(solution_str) == ground_truth:
        return 1.0
    return digit_bonus * digit_share(solution_str)


async def compute_score_async(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    digit_bonus: float = 0.2,
    judge_seconds: float = 0.01,
) -> float:
    """The same as a coroutine: many calls wait at once. For a judge behind a network, say."""
    await asyncio.sleep(judge_seconds)  # in place of `await client.post(...)`
    return compute_score(data_source, solution_str, ground_truth, extra_info, digit_bonus)


def compute_score_with_extras(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    digit_bonus: float = 0.2,
) -> dict[str, Any]:
    """A dict: "score" is the reward, the other entries are for people.

    Numbers among them become validation metrics of their own (val-core/sums/acc/mean@1, val-aux/sums/digits/mean@1),
    and "pred" is what a majority vote over several samples counts.
    """
    answer = last_number(solution_str)
    return {
        "score": compute_score(data_source, solution_str, ground_truth, extra_info, digit_bonus),
        "acc": float(answer == ground_truth),
        "digits": digit_share(solution_str),
        "pred": answer or "",
    }
