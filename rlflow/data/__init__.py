"""Prompts: files to rows, rows to batches, and the cursor that makes a resumed run see what it would have seen.

    files -> RowTable (checked at load) -> RLHFDataset -> PromptLoader (+ EpochSampler) -> rows with a uid

Names are imported on first use, so that `import rlflow.data` loads neither torch nor pyarrow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlflow.data.collate import collate_fn
    from rlflow.data.dataset import PromptDataset, RLHFDataset, create_rl_dataset, get_dataset_class
    from rlflow.data.loader import PromptLoader, create_train_loader, iterate_validation
    from rlflow.data.sampler import EpochSampler, create_rl_sampler
    from rlflow.data.table import RowTable

_HOMES = {
    "EpochSampler": "sampler",
    "PromptDataset": "dataset",
    "PromptLoader": "loader",
    "RLHFDataset": "dataset",
    "RowTable": "table",
    "collate_fn": "collate",
    "create_rl_dataset": "dataset",
    "create_rl_sampler": "sampler",
    "create_train_loader": "loader",
    "get_dataset_class": "dataset",
    "iterate_validation": "loader",
}
__all__ = [
    "EpochSampler",
    "PromptDataset",
    "PromptLoader",
    "RLHFDataset",
    "RowTable",
    "collate_fn",
    "create_rl_dataset",
    "create_rl_sampler",
    "create_train_loader",
    "get_dataset_class",
    "iterate_validation",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
