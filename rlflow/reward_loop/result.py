"""What goes into a reward call and what comes out of it.

Invariants
    - A reward is a score that fp32 can hold or `Invalid(reason)`. Nothing that went wrong is ever turned into a number.
    - Input and result are plain Python: no tensors, so neither side needs torch.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from typing import Any

MAX_REASON_CHARS = 300
# Scores become fp32 tensors; beyond its largest number there is only inf.
MAX_SCORE = (2 - 2**-23) * 2.0**127


class InvalidRewardError(Exception):
    """A scorer gave no usable score; the text is the reason a user reads."""


@dataclass(frozen=True)
class Score:
    """A finite score and the values the reward function returned beside it (validation variables, filter metrics)."""

    value: float
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Invalid:
    """No score: the sample is masked. `reason` is one line."""

    reason: str


RewardResult = Score | Invalid


@dataclass
class RewardInput:
    """One trajectory to score: the last output of a session.

    Fields:
        prompt_ids, response_ids: token ids without padding.
        response_mask: 1 where the model wrote the token, 0 where a tool did.
        response_text: the decoded response without special tokens; None when the sender did not decode it.
        non_tensor_batch: the row's dataset columns (`data_source`, `reward_model`, `extra_info`, ...) plus
            `__num_turns__`, `tool_extra_fields` (the output's extra_fields), `prompt_len`, `response_len`.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_text: str | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """`data["data_source"]`: a column of the row; `KeyError` names the columns there are."""
        if name not in self.non_tensor_batch:
            raise KeyError(f"the row has no column {name!r}; it has {sorted(self.non_tensor_batch)}")
        return self.non_tensor_batch[name]


def one_line(text: object) -> str:
    """A reason fit for tags, logs and JSON: one line, bounded, encodable as UTF-8, no control characters."""
    line = " ".join(str(text).split())
    line = line.encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "\\x00")
    return line if len(line) <= MAX_REASON_CHARS else line[: MAX_REASON_CHARS - 3] + "..."


def normalise_result(raw: Any) -> float | dict[str, Any]:
    """What a reward function returned, as a float or as a dict of plain values with a finite float under "score".

    Numbers of numpy and torch count as numbers. Raises `InvalidRewardError` for everything else.
    """
    if isinstance(raw, dict):
        if "score" not in raw:
            raise InvalidRewardError(f'the dict has no "score"; it has {sorted(map(str, raw))}')
        odd = [key for key in raw if not isinstance(key, str)]
        if odd:
            raise InvalidRewardError(f"the dict has keys that are no strings: {odd[:3]!r}")
        return {key: _number(value) if key == "score" else _plain(value, key) for key, value in raw.items()}
    return _number(raw)


def _number(value: Any) -> float:
    plain = value
    if not isinstance(value, (numbers.Real, str, bytes, type(None))) and callable(getattr(value, "item", None)):
        try:
            plain = value.item()
        except (ValueError, RuntimeError, TypeError) as error:
            raise InvalidRewardError(f"the score is a {type(value).__name__} of several elements") from error
    if not isinstance(plain, numbers.Real):
        raise InvalidRewardError(f"the score is a {type(value).__name__}, expected a number: {value!r:.80}")
    try:
        number = float(plain)
    except OverflowError as error:
        raise InvalidRewardError("the score is too large for a float") from error
    if not math.isfinite(number):
        raise InvalidRewardError(f"the score is {number}")
    if abs(number) > MAX_SCORE:
        raise InvalidRewardError(f"the score is {number:g}, beyond what fp32 can hold ({MAX_SCORE:.3g})")
    return number


def _plain(value: Any, key: str) -> Any:
    """`value` as JSON can say it: None, bool, int, finite float, str, list, dict."""
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidRewardError(f"the value of {key!r} is {value}")
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, key) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item, f"{key}.{name}") for name, item in value.items()}
    if callable(getattr(value, "tolist", None)):  # numpy and torch, scalars and arrays
        return _plain(value.tolist(), key)
    raise InvalidRewardError(f"the value of {key!r} is a {type(value).__name__}, which a reward cannot carry")


def to_score(result: Any) -> Score:
    """What a reward manager returned (`{"reward_score", "reward_extra_info"}`) as `Score`.

    Raises:
        InvalidRewardError: no such dict, or a score that is no finite number.
    """
    if not isinstance(result, dict) or "reward_score" not in result:
        raise InvalidRewardError(
            f'the reward manager returned {type(result).__name__}, expected {{"reward_score", "reward_extra_info"}}'
        )
    info = result.get("reward_extra_info") or {}
    if not isinstance(info, dict):
        raise InvalidRewardError(f"reward_extra_info is a {type(info).__name__}, expected a dict")
    return Score(_number(result["reward_score"]), {str(key): _plain(value, str(key)) for key, value in info.items()})
