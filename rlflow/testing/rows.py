"""Rows of tokens without padding, and the dense or jagged batches that are cut from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.utils.nested import nested_from_values, nested_to_padded


@dataclass(frozen=True)
class Rows:
    """Rows one after the other.

    `lengths[i]` tokens belong to row i; `mask` (bool) and every field are 1-D over all tokens. `trained` names the
    field that the gradient is taken with respect to, `weights` the one with importance weights, if there is one.
    """

    lengths: tuple[int, ...]
    mask: Tensor
    fields: Mapping[str, Tensor]
    trained: str
    weights: str | None = None

    @property
    def starts(self) -> list[int]:
        """Position of each row's first token."""
        return [sum(self.lengths[:row]) for row in range(len(self.lengths))]

    def place(self, position: int) -> tuple[int, int]:
        """(row, token in the row) of a position."""
        row = max(row for row, start in enumerate(self.starts) if start <= position and self.lengths[row])
        return row, position - self.starts[row]

    def counts(self) -> dict[str, int]:
        """What the engine counts in a mini-batch: valid tokens, and rows that have any."""
        rows = [bool(self.mask[s : s + n].any()) for s, n in zip(self.starts, self.lengths, strict=True)]
        return {"batch_num_tokens": int(self.mask.sum()), "global_batch_size": sum(rows)}

    def with_trained(self, values: Tensor) -> Rows:
        """The same rows with other values of the trained field."""
        return dataclasses.replace(self, fields={**self.fields, self.trained: values})

    def with_weights_of(self, row: int | None, factor: float) -> tuple[Rows, Tensor]:
        """The same rows with the weights of one row (None: of all) multiplied, and the factor of each token, 1-D."""
        factors = torch.ones(len(self.mask), dtype=self.fields[self.trained].dtype)
        start = 0 if row is None else self.starts[row]
        factors[start : None if row is None else start + self.lengths[row]] = factor
        name = str(self.weights)
        return dataclasses.replace(self, fields={**self.fields, name: self.fields[name] * factors}), factors

    def with_masked(self, value: float) -> Rows:
        """The same rows with `value` in every field at every masked token."""
        fields = {name: field.masked_fill(~self.mask, value) for name, field in self.fields.items()}
        return dataclasses.replace(self, fields=fields)

    def with_masked_rows(self, lengths: Sequence[int]) -> Rows:
        """The same rows, and rows of those lengths without a valid token behind them."""
        extra = sum(lengths)
        return Rows(
            lengths=(*self.lengths, *lengths),
            mask=torch.cat([self.mask, torch.zeros(extra, dtype=torch.bool)]),
            fields={name: torch.cat([field, field.new_full((extra,), -0.7)]) for name, field in self.fields.items()},
            trained=self.trained,
            weights=self.weights,
        )

    def dense(self, rows: Sequence[int], extra: int = 0, fill: float = 0.0) -> tuple[dict[str, Tensor], Tensor]:
        """Fields and mask of some rows as [B, T]; T is the longest of them plus `extra`, `fill` stands behind a row."""
        width = max((self.lengths[row] for row in rows), default=0) + extra
        column = torch.arange(width)
        lengths = torch.tensor([self.lengths[row] for row in rows]).unsqueeze(1)
        starts = torch.tensor([self.starts[row] for row in rows]).unsqueeze(1)
        inside = column < lengths
        index = torch.where(inside, starts + column, 0)
        fields = {name: field[index].masked_fill(~inside, fill) for name, field in self.fields.items()}
        return fields, self.mask[index] & inside

    def jagged(self, rows: Sequence[int]) -> tuple[dict[str, Tensor], Tensor]:
        """The same through jagged tensors, as an engine with packed rows does it."""
        lengths = [self.lengths[row] for row in rows]
        spans = [torch.arange(self.starts[row], self.starts[row] + self.lengths[row]) for row in rows]
        index = torch.cat(spans)
        fields = {
            name: nested_to_padded(nested_from_values(field[index], lengths)) for name, field in self.fields.items()
        }
        return fields, nested_to_padded(nested_from_values(self.mask[index].long(), lengths)).bool()


def random_rows(
    fields: Mapping[str, tuple[float, float]],
    trained: str,
    *,
    near: Mapping[str, tuple[str, float]] | None = None,
    weights: str | None = None,
    rows: int = 8,
    longest: int = 7,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Rows:
    """Rows of random length with holes in their masks; one row is empty, another has no valid token.

    Args:
        fields: name -> (low, high) of uniform values a token.
        trained: the field with the gradient.
        near: name -> (other, scale): the field is the other one plus normal noise, for policies that are close.
        weights: the field with importance weights, if one of them is that.
        rows: at least 4.
        longest: tokens of the longest row.
        seed: of a generator of its own.
        dtype: of the fields.
    """
    if rows < 4:
        raise ValueError(f"rows={rows}: an empty row, a masked one and two to move around need at least 4")
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (rows,), generator=generator).tolist()
    lengths[1], lengths[-1] = 0, longest
    total = sum(lengths)
    mask = torch.rand(total, generator=generator) < 0.8
    mask[: lengths[0]] = False
    mask[-1] = True
    made = {
        name: (low + (high - low) * torch.rand(total, generator=generator, dtype=torch.float64)).to(dtype)
        for name, (low, high) in fields.items()
    }
    for name, (other, scale) in (near or {}).items():
        made[name] = made[other] + (scale * torch.randn(total, generator=generator, dtype=torch.float64)).to(dtype)
    return Rows(lengths=tuple(lengths), mask=mask, fields=made, trained=trained, weights=weights)
