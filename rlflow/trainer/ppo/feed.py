"""Prompts for training and validation, as batches the agent loops take.

Invariant: a prompt's name (uid) is a function of its place in the data: `e{epoch}r{row}a{attempt}` in training,
`v{step}r{row}a0` in validation. The cursor that a checkpoint stores is the trained frontier.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from rlflow.agent_loop.settings import BASELINE_COLUMN
from rlflow.data import create_rl_dataset, create_train_loader, iterate_validation
from rlflow.data.loader import place_of
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import DataError
from rlflow.utils.tokenizer import policy_tokenizer

logger = logging.getLogger(__name__)


class PromptFeed:
    """Data sets, the train loader and the length of the run.

    `steps_per_epoch` counts whole batches; `total_training_steps` is that x epochs unless the configuration sets it.
    """

    def __init__(self, config: Any) -> None:
        data = config.data
        self.config = config
        tokenizer = policy_tokenizer(config)
        self.train_dataset = create_rl_dataset(
            data.train_files, data, tokenizer, None, is_train=True, max_samples=data.train_max_samples
        )
        self.val_dataset = create_rl_dataset(
            data.val_files, data, tokenizer, None, is_train=False, max_samples=data.val_max_samples
        )
        if len(self.val_dataset) == 0:
            raise DataError(f"data.val_files={data.val_files} has no row to validate on")
        self.loader = create_train_loader(data, self.train_dataset)
        self.steps_per_epoch = len(self.loader)
        trainer = config.trainer
        self.total_training_steps: int = (
            self.steps_per_epoch * trainer.total_epochs
            if trainer.total_training_steps is None
            else trainer.total_training_steps
        )

    @property
    def prompts_per_epoch(self) -> int:
        """Prompts that one pass over the data visits."""
        return self.steps_per_epoch * self.loader.batch_size

    def next_train_batch(self, step: int, count: int | None = None) -> Any:
        """The next `count` prompts (None: `data.train_batch_size`) as a TensorDict; see `_to_batch`.

        With ReMax each of them asks for a greedy session beside the sampled ones.
        """
        rows = self.loader.next_batch(self.config.data.train_batch_size if count is None else count)
        if self.config.algorithm.adv_estimator == "remax":
            rows = [{**row, BASELINE_COLUMN: True} for row in rows]
        return self._to_batch(rows, step, validate=False)

    def validation_batches(self, step: int) -> Iterator[Any]:
        """All validation prompts once, `data.val_batch_size` at a time."""
        data = self.config.data
        for rows in iterate_validation(self.val_dataset, data.val_batch_size, data.validation_shuffle):
            named = [{**row, "uid": f"v{step}r{row['row']}a0"} for row in rows]
            yield self._to_batch(named, step, validate=True)

    def mark_trained(self, uids: list[str]) -> None:
        """Move the frontier past these prompts."""
        self.loader.mark_trained(uids)

    @staticmethod
    def epoch_of(uids: Iterable[str]) -> int:
        """Epoch in which the first of these train prompts was taken."""
        return min(place_of(uid)[0] for uid in uids)

    @staticmethod
    def uids(batch: Any) -> list[str]:
        """Names of the prompts of a batch."""
        uids = tu.get(batch, "uid")
        # TensorDict folds a column of equal objects (one row) into the object.
        return [uids] if isinstance(uids, str) else list(uids)

    @staticmethod
    def partition(batch: Any) -> str:
        """Partition of the TransferQueue the batch belongs to."""
        return "val" if tu.get_non_tensor_data(batch, "validate", False) else "train"

    @staticmethod
    def _to_batch(rows: list[dict[str, Any]], step: int, validate: bool) -> Any:
        """Every column as one object a row, plus `global_steps` and `validate` for the batch."""
        columns = {name: np.fromiter((row[name] for row in rows), dtype=object, count=len(rows)) for name in rows[0]}
        columns = {name: column for name, column in columns.items() if name != "dummy_tensor"}
        return tu.get_tensordict(columns, {"global_steps": step, "validate": validate})
