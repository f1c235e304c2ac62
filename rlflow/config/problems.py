"""Sentences of the checks: what was set, why it cannot work, what to try."""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def choice(key: str, value: str, choices: Iterable[str], why: str = "") -> str:
    """`value` is none of `choices`; the nearest one is offered."""
    names = sorted(choices)
    close = difflib.get_close_matches(value, names, n=1)
    return (
        f"{key}={value} {why or 'is unknown'}.\n    try:    {key}={close[0] if close else names[0]} "
        f"(choices: {', '.join(names)})"
    )


def below(key: str, value: float, low: float) -> list[str]:
    """Nothing when `value` is finite and at least `low` (1e-9: above 0)."""
    if math.isfinite(value) and value >= low:
        return []
    limit = "more than 0" if low == 1e-9 else f"at least {low:g}"
    return [f"{key}={value} must be {limit}.\n    try:    {key}={max(low, 1):g}"]


def optimizer(node: str, optim: Any) -> list[str]:
    """Nothing when the optimizer class of `{node}.optim` exists."""
    try:
        known = hasattr(importlib.import_module(optim.optimizer_impl), optim.optimizer)
    except ImportError:
        known = False
    if known:
        return []
    return [
        f"{node}.optim.optimizer={optim.optimizer}: {optim.optimizer_impl} has no such class.\n"
        f"    try:    {node}.optim.optimizer=AdamW {node}.optim.optimizer_impl=torch.optim"
    ]


def is_missing_folder(model: str) -> bool:
    """Whether `model` is a path (no hub id) without a model."""
    return model.startswith(("/", "~", "./", "../")) and not (Path(model).expanduser() / "config.json").is_file()
