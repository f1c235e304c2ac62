"""Sentences of the checks: what was set, why it cannot work, what to try."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlflow.config.tree import default_of
from rlflow.utils.spelling import nearest

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_USUAL_OPTIMIZERS = {("torch.optim", name) for name in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adafactor")}


def choice(key: str, value: str, choices: Iterable[str], why: str = "") -> str:
    """`value` is none of `choices`; the nearest one is offered."""
    names = sorted(choices)
    return (
        f"{key}={value} {why or 'is unknown'}.\n    try:    {key}={nearest(value, names) or names[0]} "
        f"(choices: {', '.join(names)})"
    )


def below(key: str, value: float, low: float) -> list[str]:
    """Nothing when `value` is finite and at least `low` (1e-9: above 0)."""
    return outside(key, value, low, math.inf)


def outside(key: str, value: float | None, low: float, high: float, usual: float | None = None) -> list[str]:
    """Nothing when `value` is null, or finite and within [`low`, `high`] (`low` 1e-9: above 0; infinite: no bound).

    What to try is `usual`, else the default of the key where that is a possible value.
    """
    if value is None or (math.isfinite(value) and low <= value <= high):
        return []
    lowest = "more than 0" if low == 1e-9 else f"at least {low:g}"
    limit = "a finite number" if math.isinf(low) else lowest if math.isinf(high) else f"between {low:g} and {high:g}"
    if usual is None:
        default = default_of(key)
        usable = isinstance(default, (int, float)) and low <= default <= high
        usual = default if usable else max(low, 1)
    shown = f"{usual:g}" if isinstance(usual, float) else usual
    return [f"{key}={value} must be {limit}.\n    try:    {key}={shown}"]


def optimizer(node: str, optim: Any) -> list[str]:
    """Nothing when the optimizer class of `{node}.optim` exists."""
    if (optim.optimizer_impl, optim.optimizer) in _USUAL_OPTIMIZERS:
        return []  # known without importing torch
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
    """Whether `model` can only be a path (no hub id) and there is no model: no config.json."""
    folder = Path(model).expanduser()
    is_path = model.startswith(("/", "~", "./", "../")) or not _HUB_ID.fullmatch(model) or folder.is_dir()
    return is_path and not (folder / "config.json").is_file()


def missing_package(key: str, package: str, extra: str) -> list[str]:
    """Nothing when the package is installed that the value of `key` needs."""
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.origin is not None:  # a folder of that name passes for a package without an origin
        return []
    return [f"{key} needs the package {package}, which is not installed.\n    try:    pip install 'rlflow[{extra}]'"]
