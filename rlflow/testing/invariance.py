"""What has to stay the same however the rows of a mini-batch are arranged.

    micro_batches   any split into micro-batches, each as wide as its own longest row
    dp_size         any number of data-parallel ranks, also of unequal size (gradients are averaged over ranks)
    row_order       any order of the rows
    packing         jagged rows instead of one dense matrix
    padding         wider padding, and rows without a valid token
    masked          NaN wherever the mask is not set, which must have no gradient either
    weights         importance weights, where the rows have them: a row's gradient is proportional to its weights

For each of them value and gradient must be those of the whole mini-batch in one dense matrix (with doubled weights: of
the rows that have them, twice those). The counts that the
engine knows (tokens and rows of the mini-batch on all ranks, `dp_size`) are handed to the loss in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.testing.rows import Rows

PROPERTIES = ("micro_batches", "dp_size", "row_order", "packing", "padding", "masked", "weights")

# (fields [B, T], mask [B, T] bool, counts) -> scalar
LossFn = Callable[[Mapping[str, Tensor], Tensor, Mapping[str, Any]], Tensor]
# Rank -> micro-batch -> row numbers.
Split = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Arrangement:
    """One way to arrange the rows, in words and as data."""

    text: str
    rows: Rows
    split: Split
    extra: int = 0
    fill: float = 0.0
    jagged: bool = False
    # Of the gradient, by token; None: it stays. The value is only compared where all tokens have the same factor.
    factors: Tensor | None = None


@dataclass(frozen=True)
class Outcome:
    """Loss of a mini-batch and its gradient by token, 1-D."""

    value: float
    gradient: Tensor


def check_loss(
    loss: LossFn,
    rows: Rows,
    *,
    properties: Sequence[str] = PROPERTIES,
    tolerance: float = 1e-6,
    name: str = "the loss",
) -> None:
    """Check any loss over tokens.

    Args:
        loss: called with dense fields [B, T], the mask [B, T] and the counts `dp_size`, `batch_num_tokens`,
            `global_batch_size`; returns a scalar.
        rows: the mini-batch, e.g. from `random_rows`.
        properties: some of `PROPERTIES`.
        tolerance: largest allowed difference, relative to the largest gradient (for the value: to it or to 1).
        name: how messages call the loss.

    Raises:
        AssertionError: a property does not hold; the loss is no scalar; or it says nothing (no finite gradient, or zero
            everywhere).
        ValueError: a property that does not exist.
    """
    unknown = sorted(set(properties) - set(PROPERTIES))
    if unknown:
        raise ValueError(f"properties {unknown} do not exist; choose from {PROPERTIES}")
    everything = [[list(range(len(rows.lengths)))]]
    whole = _run(loss, Arrangement("the whole mini-batch", rows, everything), name)
    if not (torch.isfinite(whole.gradient).all() and torch.isfinite(torch.tensor(whole.value))):
        raise AssertionError(f"{name}: value or gradient of the whole mini-batch is not finite (value {whole.value})")
    if not whole.gradient.any():
        raise AssertionError(f"{name}: the gradient is zero at every token, so the check would say nothing")
    for wanted in properties:
        for arrangement in ARRANGEMENTS[wanted](rows):
            _compare(name, wanted, arrangement, whole, _run(loss, arrangement, name), tolerance)


def _run(loss: LossFn, arrangement: Arrangement, name: str) -> Outcome:
    """Sum over micro-batches, mean over ranks, as engines and gradient averaging do it."""
    rows = arrangement.rows
    leaf = rows.fields[rows.trained].detach().clone().requires_grad_()
    rows = rows.with_trained(leaf)
    counts = {"dp_size": len(arrangement.split), **rows.counts()}
    total = leaf.new_zeros(())
    for micro_batches in arrangement.split:
        for micro_batch in micro_batches:
            if arrangement.jagged:
                fields, mask = rows.jagged(micro_batch)
            else:
                fields, mask = rows.dense(micro_batch, arrangement.extra, arrangement.fill)
            value = loss(fields, mask, counts)
            if not (isinstance(value, Tensor) and value.numel() == 1):
                shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise AssertionError(f"{name} returned {shape}; a loss is one number, see agg_loss")
            total = total + value.reshape(())
    total = total / len(arrangement.split)
    gradient = torch.autograd.grad(total, leaf, allow_unused=True)[0] if total.requires_grad else None
    return Outcome(float(total.detach()), torch.zeros_like(leaf) if gradient is None else gradient)


# --- arrangements -----------------------------------------------------------------------------------------------------


def _micro_batches(rows: Rows) -> Iterator[Arrangement]:
    for sizes in ([1], [2], [3], [1, 3, 2], [len(rows.lengths) - 1, 1]):
        split = _cut(list(range(len(rows.lengths))), sizes)
        yield Arrangement(f"micro-batches of rows {split}", rows, [split])


def _dp_size(rows: Rows) -> Iterator[Arrangement]:
    numbers = list(range(len(rows.lengths)))
    for ranks in (2, 3):
        yield Arrangement(f"{ranks} ranks in turns", rows, [_cut(numbers[rank::ranks], [2]) for rank in range(ranks)])
    unequal = [[numbers[:1]], _cut(numbers[1:], [3])]
    yield Arrangement(f"2 ranks with rows {unequal}", rows, unequal)
    # A rank whose rows are all masked still takes part.
    padded = rows.with_masked_rows([1, 2])
    yield Arrangement("a rank with masked rows only", padded, [[numbers], [[len(numbers), len(numbers) + 1]]])


def _row_order(rows: Rows) -> Iterator[Arrangement]:
    numbers = list(range(len(rows.lengths)))
    for order in (numbers[::-1], numbers[::2] + numbers[1::2]):
        yield Arrangement(f"rows in the order {order}", rows, [[order]])


def _packing(rows: Rows) -> Iterator[Arrangement]:
    numbers = list(range(len(rows.lengths)))
    yield Arrangement("jagged rows", rows, [[numbers]], jagged=True)


def _padding(rows: Rows) -> Iterator[Arrangement]:
    numbers = list(range(len(rows.lengths)))
    for extra in (1, 17):
        yield Arrangement(f"{extra} columns of padding more", rows, [[numbers]], extra=extra)
    padded = rows.with_masked_rows([1, 1, 4])
    yield Arrangement("3 rows more that are masked", padded, [[list(range(len(padded.lengths)))]])


def _masked(rows: Rows) -> Iterator[Arrangement]:
    numbers = list(range(len(rows.lengths)))
    for value in (float("nan"), float("inf"), 1e4):
        hidden = rows.with_masked(value)
        yield Arrangement(f"{value} at masked tokens and in the padding", hidden, [[numbers]], extra=2, fill=value)


def _weights(rows: Rows) -> Iterator[Arrangement]:
    if rows.weights is None:
        return
    numbers = list(range(len(rows.lengths)))
    for row in (None, *numbers):
        doubled, factors = rows.with_weights_of(row, 2.0)
        whose = "all weights" if row is None else f"the weights of row {row}"
        yield Arrangement(f"{whose} doubled", doubled, [[numbers]], factors=factors)


def _cut(numbers: list[int], sizes: Sequence[int]) -> list[list[int]]:
    """Consecutive pieces of the given sizes, over and over."""
    pieces: list[list[int]] = []
    while numbers:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(numbers[:size])
        numbers = numbers[size:]
    return pieces


ARRANGEMENTS: dict[str, Callable[[Rows], Iterator[Arrangement]]] = {
    "micro_batches": _micro_batches,
    "dp_size": _dp_size,
    "row_order": _row_order,
    "packing": _packing,
    "padding": _padding,
    "masked": _masked,
    "weights": _weights,
}


# --- comparison -------------------------------------------------------------------------------------------------------


def _compare(
    name: str, wanted: str, arrangement: Arrangement, whole: Outcome, found: Outcome, tolerance: float
) -> None:
    rows, size = arrangement.rows, whole.gradient.numel()
    problem = f"{name} breaks {wanted!r}: with {arrangement.text} "
    factors = torch.ones_like(whole.gradient) if arrangement.factors is None else arrangement.factors
    reference = "in one dense matrix" if arrangement.factors is None else "and has to be"
    allowed = tolerance * max(abs(whole.value), 1.0)
    value = whole.value * float(factors[0])
    if bool((factors == factors[0]).all()) and not abs(found.value - value) <= allowed:
        raise AssertionError(
            f"{problem}the value is {found.value:.8g}, {reference} {value:.8g} "
            f"(difference {abs(found.value - value):.3g}, allowed {allowed:.3g})"
        )
    # Rows that an arrangement adds come last and are masked: their gradient must be 0.
    expected = torch.cat([whole.gradient * factors, whole.gradient.new_zeros(found.gradient.numel() - size)])
    if wanted == "masked":
        expected = expected.masked_fill(~rows.mask, 0.0)
    difference = (found.gradient - expected).abs()
    allowed = tolerance * float(whole.gradient.abs().max())
    if bool((difference <= allowed).all()):
        return
    worst = int(difference.nan_to_num(nan=torch.inf).argmax())
    wrong = int((~(difference <= allowed)).sum())
    row, token = rows.place(worst)
    raise AssertionError(
        f"{problem}the gradient at row {row}, token {token}{'' if rows.mask[worst] else ' (masked)'} is "
        f"{float(found.gradient[worst]):.8g}, {reference} {float(expected[worst]):.8g} "
        f"(difference {float(difference[worst]):.3g}, allowed {allowed:.3g}; {wrong} of {difference.numel()} tokens "
        "differ)"
    )
