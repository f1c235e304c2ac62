"""Numbers that a reward function returned beside the score, by name."""

from __future__ import annotations

import math
from typing import Any

from rlflow.utils.errors import RewardError


def reward_number(info: dict[str, Any], name: str, key: str, option: str) -> float:
    """The number `name` of a trajectory's `reward_extra_info`.

    Args:
        info: what the reward function returned.
        name: the name that `option` gives.
        key: of the trajectory.
        option: configuration key, for the message.

    Raises:
        RewardError: no finite number under that name; says which there are.
    """
    value = info.get(name)
    if isinstance(value, (bool, int, float)) and math.isfinite(value):
        return float(value)
    there = sorted(other for other, item in info.items() if isinstance(item, (bool, int, float)))
    raise RewardError(
        f"{option} names {name}, but the reward function gave trajectory {key} "
        + (f"{value!r} under it" if name in info else "no such number")
        + f". It returned {', '.join(there) or 'no number'}. Choose one of these, or return {name} in the dict of "
        "every answer, beside `score`."
    )
