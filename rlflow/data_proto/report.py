"""What is in a batch, for people."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from tensordict import TensorDict
from torch import Tensor

logger = logging.getLogger(__name__)
_GIB = 2**30


def describe(batch: TensorDict | None, arrays: Mapping[str, np.ndarray], meta_info: Mapping[str, Any]) -> str:
    """A heading for each part, and a line for each name in it."""
    lines = ["batch"]
    for key, value in batch.items() if batch is not None else ():
        if isinstance(value, Tensor):
            layout = " jagged" if value.is_nested else ""
            shape = ", ".join("*" if not isinstance(size, int) else str(size) for size in value.shape)
            lines.append(f"  {key}: ({shape}){layout} ({value.dtype}) {value.device}")
        else:
            lines.append(f"  {key}: {type(value).__name__}")
    lines.append("non_tensor_batch")
    lines += [f"  {key}: ndarray{array.shape} ({array.dtype})" for key, array in arrays.items()]
    lines.append("meta_info")
    lines += [f"  {key}: {type(value).__name__}" for key, value in meta_info.items()]
    return "\n".join(lines)


def log_size(batch: TensorDict | None, arrays: Mapping[str, np.ndarray], prefix: str) -> None:
    """One line at INFO: GiB of tensors and of arrays (of an array of objects, of its pointers only)."""
    tensors = [value for value in (batch.values() if batch is not None else ()) if isinstance(value, Tensor)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    of_arrays = sum(array.nbytes for array in arrays.values())
    logger.info(
        "%ssize of tensors: %.3f GiB, of arrays: %.3f GiB",
        f"{prefix}, " if prefix else "",
        size / _GIB,
        of_arrays / _GIB,
    )
