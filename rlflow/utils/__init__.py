"""Leaf helpers. Importing the package loads none of them; `groupwise` is reached here too."""

from __future__ import annotations

from typing import Any

_GROUPWISE = ("as_torch_index", "group_mean_std")
__all__ = ["as_torch_index", "group_mean_std"]


def __getattr__(name: str) -> Any:
    # Lazy: `import rlflow` passes through this package and must not load torch.
    if name in _GROUPWISE:
        from rlflow.utils import groupwise

        return getattr(groupwise, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
