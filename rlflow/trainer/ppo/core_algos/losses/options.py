"""Options of policy losses, read from the actor config.

A loss gets the whole actor config. Its own options live in `actor.policy_loss`; those that the reference reads from
`actor` itself (`tau_pos`, `clip_ratio_c`, ...) are found in either place, `policy_loss` first. Config and `policy_loss`
may be objects with attributes or mappings (a plain dict in a script or a test).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def option(config: Any, name: str, default: Any = None) -> Any:
    """`config.policy_loss.<name>`, else `config.<name>`, else `default`; null counts as not set."""
    for node in (_read(config, "policy_loss"), config):
        value = _read(node, name)
        if value is not None:
            return value
    return default


def positive_option(config: Any, name: str, default: float | None = None) -> float:
    """An option that must be set and above 0; ValueError otherwise."""
    value = option(config, name, default)
    if value is None or not value > 0:
        raise ValueError(f"actor.policy_loss.{name}={'null' if value is None else value} must be > 0")
    return float(value)


def clip_bounds(config: Any) -> tuple[float, float]:
    """(low, high) clip ranges: `clip_ratio_low` and `clip_ratio_high`, each falls back to `clip_ratio`."""
    both = option(config, "clip_ratio")
    low, high = option(config, "clip_ratio_low", both), option(config, "clip_ratio_high", both)
    if low is None or high is None:
        raise ValueError("a clipped policy loss needs actor.clip_ratio, or both clip_ratio_low and clip_ratio_high")
    return float(low), float(high)


def global_counts(config: Any) -> dict[str, Any]:
    """Arguments of `agg_loss` that the engine knows (`config.global_batch_info`); {}: the counts of this batch."""
    return dict(_read(config, "global_batch_info") or {})


def _read(node: Any, name: str) -> Any:
    return node.get(name) if isinstance(node, Mapping) else getattr(node, name, None)
