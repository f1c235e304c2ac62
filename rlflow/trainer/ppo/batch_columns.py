"""One way to read the batches that users have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlflow.utils.errors import ContractError
from rlflow.utils.nested import is_nested, nested_lengths, nested_to_padded


class BatchColumns:
    """The columns of a batch by name.

    Args:
        batch: a mapping or TensorDict of columns; or an object with the tensors in `batch`, other columns in
            `non_tensor_batch` and facts about the batch in `meta_info`.
    """

    def __init__(self, batch: Any) -> None:
        divided = hasattr(batch, "non_tensor_batch")
        parts = [getattr(batch, name, None) for name in ("batch", "non_tensor_batch", "meta_info")]
        self._parts: list[Any] = [part for part in parts if part is not None] if divided else [batch]

    def __contains__(self, name: str) -> bool:
        return self._part(name) is not None

    def __iter__(self) -> Iterator[str]:
        return (str(name) for part in self._parts for name in part.keys())

    def __getitem__(self, name: str) -> Any:
        part = self._part(name)
        if part is None:
            raise ContractError(f"the metrics need the column {name!r}; the batch has {', '.join(sorted(self))}")
        return part[name]

    def _part(self, name: str) -> Any:
        # keys(): `in` on a TensorDict asks for values.
        return next((part for part in self._parts if name in part.keys()), None)  # noqa: SIM118

    def tensor(self, *names: str) -> Tensor:
        """The first of these columns that is there, dense [B, T] or jagged [B, j] as it is."""
        found = next((name for name in names if name in self), names[0])
        return torch.as_tensor(self[found])

    def dense(self, name: str) -> Tensor:
        """A column as float [B, T]; zeros behind the rows of a jagged one."""
        field = self.tensor(name)
        return (nested_to_padded(field) if is_nested(field) else field).float()

    def numbers(self, name: str) -> Tensor:
        """A column of one number a row, float [B]; rows without one (None) are left out."""
        column = self[name]
        if isinstance(column, Tensor):
            return column.float().reshape(-1)
        values = column.tolist() if hasattr(column, "tolist") else column
        return torch.tensor([float(value) for value in np.atleast_1d(values).tolist() if value is not None])

    def lengths(self) -> tuple[Tensor, Tensor]:
        """Tokens of each row's prompt and response, float [B] each.

        From the columns `prompt_length` and `response_length`, else from jagged `prompts` and `responses`, else from
        `attention_mask` [B, P + T], whose last T columns are the response (T: width of `response_mask`).

        Raises:
            ContractError: none of them is there.
        """
        if "prompt_length" in self and "response_length" in self:
            return self.numbers("prompt_length"), self.numbers("response_length")
        if all(name in self and is_nested(self[name]) for name in ("prompts", "responses")):
            return nested_lengths(self["prompts"]).float(), nested_lengths(self["responses"]).float()
        if "attention_mask" not in self:
            raise ContractError(
                "the batch does not say how long its rows are: give it prompt_length and response_length (one number a "
                "row), jagged prompts and responses, or attention_mask"
            )
        mask = self.dense("attention_mask")
        start = mask.shape[1] - self._response_width()
        return mask[:, :start].sum(-1), mask[:, start:].sum(-1)

    def padded_widths(self) -> tuple[int, int]:
        """Columns of the padded (prompts, responses): those of the batch, or of its longest rows when it is jagged."""
        if "attention_mask" in self and not is_nested(self["attention_mask"]):
            response = self._response_width()
            return self.tensor("attention_mask").shape[1] - response, response
        prompt, _ = self.lengths()
        return int(prompt.max()) if prompt.numel() else 0, self._response_width()

    def _response_width(self) -> int:
        return self.dense("response_mask" if "response_mask" in self else "responses").shape[1]
