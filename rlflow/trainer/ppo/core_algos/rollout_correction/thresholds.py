"""Bounds of the rollout correction, as users write them.

    rollout_is_threshold   2.0 or "2.0": weights are cut at 2.0 (TIS)
                           "0.5_5.0": weights outside [0.5, 5.0] become 0 (IcePop)
    rollout_rs             "token_k1,seq_max_k2": names of statistics, all of which a token must pass
    rollout_rs_threshold   one bound for all of them, or as many as there are names: "0.6_1.6,2.5"

A bound of a k1 statistic is a range of the probability RATIO, "lower_upper"; one number h means 1/h to h. A bound of a
k2 or k3 statistic is one upper value of the statistic itself.

Write the numbers of a range with a decimal point ("1.0_2.0"): YAML and Hydra read 1_2 as the number 12.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

IS_LEVELS = ("token", "sequence")
RS_OPTIONS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)


@dataclass(frozen=True)
class Bounds:
    """The range a statistic must lie in; logarithms of ratios for k1. `lower` None: no lower bound."""

    lower: float | None
    upper: float


def parse_is_threshold(threshold: Any) -> tuple[float, float | None]:
    """(upper, lower or None) of `rollout_is_threshold`.

    Raises:
        TypeError: neither a number nor a string (a bool is none).
        ValueError: not positive, not a number, or lower above upper.
    """
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float, str)):
        raise TypeError(f"rollout_is_threshold={threshold!r} must be a number (2.0) or a range ('0.5_5.0')")
    if isinstance(threshold, str) and "_" in threshold:
        lower, upper = _range(threshold, "rollout_is_threshold")
        return upper, lower
    return _positive(threshold, "rollout_is_threshold"), None


def parse_rs_options(rollout_rs: Any) -> tuple[str, ...]:
    """Names in `rollout_rs`, each once, in the order given; ValueError for a name that does not exist."""
    if not isinstance(rollout_rs, str):
        raise ValueError(f"rollout_rs={rollout_rs!r} must be a string such as 'token_k1' or 'token_k1,seq_max_k2'")
    names = tuple(dict.fromkeys(name.strip() for name in rollout_rs.split(",") if name.strip()))
    unknown = [name for name in names if name not in RS_OPTIONS]
    if unknown or not names:
        raise ValueError(f"rollout_rs={rollout_rs!r}: {unknown or 'nothing'} is no option; choose from {RS_OPTIONS}")
    return names


def parse_rs_thresholds(options: tuple[str, ...], threshold: Any) -> tuple[Bounds, ...]:
    """One `Bounds` per option of `rollout_rs_threshold`.

    Raises:
        TypeError: neither a number nor a string.
        ValueError: missing, not positive, a range where one number is needed, or a wrong number of bounds.
    """
    if threshold is None:
        raise ValueError(f"rollout_rs={','.join(options)} needs rollout_rs_threshold, e.g. {_example(options)!r}")
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float, str)):
        raise TypeError(
            f"rollout_rs_threshold={threshold!r} must be a number or a string such as {_example(options)!r}"
        )
    items = [item.strip() for item in threshold.split(",")] if isinstance(threshold, str) else [threshold]
    if len(items) not in (1, len(options)):
        raise ValueError(
            f"rollout_rs_threshold={threshold!r} has {len(items)} bounds for the {len(options)} statistics "
            f"{','.join(options)}; give one, or one each"
        )
    if len(items) == 1:
        items = items * len(options)
    return tuple(_bounds(option, item) for option, item in zip(options, items, strict=True))


def _bounds(option: str, item: float | str) -> Bounds:
    is_range = isinstance(item, str) and "_" in item
    if not option.endswith("k1"):
        if is_range:
            raise ValueError(f"rollout_rs_threshold={item!r}: {option} has one upper bound, not a range")
        return Bounds(None, _positive(item, "rollout_rs_threshold"))
    if is_range:
        lower, upper = _range(str(item), "rollout_rs_threshold")
    else:
        upper = _positive(item, "rollout_rs_threshold")
        lower = 1 / upper
        if upper < 1:
            raise ValueError(
                f"rollout_rs_threshold={item!r} for {option}: one number h means the range 1/h to h, so it must be at "
                f"least 1; give a range such as '{upper:g}_{lower:g}'"
            )
    return Bounds(math.log(lower), math.log(upper))


def _range(text: str, key: str) -> tuple[float, float]:
    parts = text.split("_")
    if len(parts) != 2:
        raise ValueError(f"{key}={text!r} is no range; write lower_upper such as '0.5_2.0'")
    lower, upper = (_positive(part, key) for part in parts)
    if lower > upper:
        raise ValueError(f"{key}={text!r}: the lower bound is above the upper one; try '{upper:g}_{lower:g}'")
    return lower, upper


def _positive(item: float | str, key: str) -> float:
    try:
        value = float(item)
    except ValueError:
        raise ValueError(f"{key}={item!r} is not a number") from None
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{key}={item!r} must be a finite number, more than 0")
    return value


def _example(options: tuple[str, ...]) -> str:
    return ",".join("0.5_2.0" if option.endswith("k1") else "2.0" for option in options)
