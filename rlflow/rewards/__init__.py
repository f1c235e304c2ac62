"""Rule scorers, chosen by a row's `data_source`.

Invariants
    - Importing this package imports no scorer and neither torch nor Ray: scorers load when their source first appears.
    - A scorer answers "how right is this text"; text without an answer is worth a score, not an error. What cannot be
      scored at all (unknown source, ground truth of the wrong kind) raises, and the reward loop masks the sample.
    - No scorer evaluates model text as code.
"""

from __future__ import annotations

from typing import Any

ScoreValue = float | dict[str, Any]

GSM8K_SOURCES = ("openai/gsm8k",)
REASONING_GYM_PREFIX = "reasoning_gym/"


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> ScoreValue:
    """Score one answer with the scorer that belongs to `data_source`.

    Args:
        data_source: the row's column of that name.
        solution_str: decoded response, special tokens skipped.
        ground_truth: `reward_model["ground_truth"]` of the row.
        extra_info: the row's column of that name; some scorers take options from it.
        sandbox_fusion_url: address of a code sandbox, for sources whose scorer runs code.
        concurrent_semaphore: bounds the calls to that sandbox.
        memory_limit_mb: memory of one sandbox run.
        **kwargs: options of the scorer (`reward_kwargs` of the config).

    Returns:
        A dict as the scorer made it, anything else as float (the first element of a tuple or list).

    Raises:
        NotImplementedError: no scorer belongs to this source.
    """
    del sandbox_fusion_url, concurrent_semaphore, memory_limit_mb  # no scorer of this table runs code
    source = str(data_source)
    result: Any
    if source in GSM8K_SOURCES:
        from rlflow.rewards import gsm8k

        result = gsm8k.compute_score(solution_str, ground_truth, **kwargs)
    elif source.startswith(REASONING_GYM_PREFIX):
        from rlflow.rewards import reasoning_gym

        result = reasoning_gym.compute_score(source, solution_str, ground_truth, extra_info, **kwargs)
    else:
        raise NotImplementedError(
            f"no scorer belongs to data_source={source!r}. Built-in: {', '.join(GSM8K_SOURCES)}, "
            f"{REASONING_GYM_PREFIX}<task>. Fix the data_source column, or give a function of your own in "
            "reward.custom_reward_function.path"
        )
    if isinstance(result, dict):
        return result
    return float(result[0]) if isinstance(result, (tuple, list)) else float(result)


def get_default_compute_score(name: str) -> Any:
    """The scorer a reward manager of this name uses when the user gives none: the same for all."""
    del name
    return default_compute_score
