"""Rows to columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlflow.utils.errors import DataError


def collate_fn(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Columns of a list of rows.

    Tensors are stacked to [N, ...]; every other value goes into a 1-D object array of length N, so that lists and dicts
    stay what they are.

    Raises:
        DataError: the rows differ in their keys, or the tensors of a column in their shape.
    """
    if not rows:
        return {}
    names = list(rows[0])
    for nth, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            missing = sorted(set(names) ^ set(row))
            raise DataError(
                f"rows 0 and {nth} of a batch have different keys: {', '.join(missing)} in one of them only. "
                "Give every row of the dataset the same keys (None where there is no value)."
            )
    return {name: _column(name, [row[name] for row in rows]) for name in names}


def _column(name: str, values: list[Any]) -> torch.Tensor | np.ndarray:
    if all(isinstance(value, torch.Tensor) for value in values):
        shapes = {tuple(value.shape) for value in values}
        if len(shapes) > 1:
            raise DataError(f"column {name!r}: tensors of different shapes {sorted(shapes)} cannot be stacked")
        return torch.stack(values)
    return np.fromiter(values, dtype=object, count=len(values))
