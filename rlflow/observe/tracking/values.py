"""From what callers log to plain numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rlflow.utils.metric import as_number


def numbers(data: Mapping[str, Any]) -> dict[str, float | int]:
    """The entries that are numbers, as plain ones."""
    found = {name: as_number(value) for name, value in data.items()}
    return {name: value for name, value in found.items() if value is not None}


def finite(data: Mapping[str, Any]) -> dict[str, float | int]:
    """The entries that are finite numbers, for trackers that refuse or distort NaN and infinity."""
    return {name: value for name, value in numbers(data).items() if math.isfinite(value)}


def flatten(tree: Any, separator: str = "/", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of nested mappings and lists; a list also gives its length as `{path}{separator}list_len`."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from flatten(value, separator, f"{prefix}{separator}{key}" if prefix else str(key))
    elif isinstance(tree, (list, tuple)):
        yield f"{prefix}{separator}list_len", len(tree)
        for index, value in enumerate(tree):
            yield from flatten(value, separator, f"{prefix}{separator}{index}")
    else:
        yield prefix, tree
