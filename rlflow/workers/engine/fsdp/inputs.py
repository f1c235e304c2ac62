"""From a micro-batch of trajectories to the arguments of one forward.

A row is a prompt of p tokens and a response of r tokens. Its prediction t (0 <= t < r) is made at position p - 1 + t
and is labelled with response token t, so that the last token of a row is never an input. Predictions stand in row
order, row i holding `lengths[i]` of them.

Rows without `prompts`/`responses` are plain sequences of L tokens with L - 1 predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError
from rlflow.workers.engine.fsdp.packed_attention import AttentionLayout, Row
from rlflow.workers.engine.fsdp.ulysses import SequencePart


@dataclass
class ModelInputs:
    """Arguments of one forward.

    Attributes:
        input_ids: int64 [1, T] packed or [B, L] padded.
        position_ids: as `input_ids`.
        layout: who attends to whom.
        predict_index: int64 [N], position of each prediction in the flattened tokens.
        labels: int64 [N].
        lengths: int64 [rows], predictions of each row; they add up to N.
        temperature: one number, or fp32 [N].
        real: how many packed tokens, the first ones, stand for tokens of rows; 0 for a padded batch.
        sequence: how the predictions of several ranks come together, where this is the part of one of them
            (`ulysses.split_sequence`): layout and lengths are then those of all, everything else is this rank's.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: AttentionLayout
    predict_index: Tensor
    labels: Tensor
    lengths: Tensor
    temperature: float | Tensor
    real: int = 0
    sequence: SequencePart | None = None


@dataclass(frozen=True)
class _Rows:
    """A micro-batch flattened: `tokens` and `positions` [sum(total)], row i at `start[i]` with `total[i]` tokens."""

    tokens: Tensor
    positions: Tensor
    start: list[int]
    total: list[int]
    predicted: list[int]

    def prompt_len(self, row: int) -> int:
        return self.total[row] - self.predicted[row]


def response_lengths(data: TensorDict) -> Tensor:
    """Predictions of each row, int64 [rows].

    Raises:
        ContractError: a response leaves no prompt token in its row to predict it from.
    """
    total = tu.nested_lengths(tu.check_jagged(data["input_ids"], "input_ids"))
    if "responses" not in data.keys():
        return (total - 1).clamp(min=0)
    predicted = _row_lengths(data["responses"])
    bad = (predicted >= total).nonzero().flatten()
    if len(bad):
        row = int(bad[0])
        raise ContractError(
            f"row {row} has {int(predicted[row])} response tokens but input_ids of {int(total[row])} tokens; "
            "input_ids must be prompt + response with at least one prompt token"
        )
    return predicted


def _row_lengths(field: Tensor) -> Tensor:
    if tu.is_nested(field):
        return tu.nested_lengths(field)
    return torch.full((field.shape[0],), field.shape[1], dtype=torch.int64, device=field.device)


def prompt_keys(data: TensorDict) -> list[bytes]:
    """Equal for two rows exactly when they share prompt tokens and positions."""
    rows = _flatten(data)
    keys = []
    for i, start in enumerate(rows.start):
        stop = start + rows.prompt_len(i)
        keys.append(rows.tokens[start:stop].numpy().tobytes() + b"|" + rows.positions[start:stop].numpy().tobytes())
    return keys


def build_inputs(
    data: TensorDict,
    *,
    temperature: float | Tensor,
    device: torch.device,
    packed: bool = True,
    share_prompts: bool = False,
    multiple_of: int = 1,
) -> ModelInputs:
    """The inputs of a micro-batch.

    Args:
        data: rows with jagged `input_ids`; optional `responses`, `position_ids` (default 0, 1, 2, ...).
        temperature: one number, or one per row [rows].
        device: where the model is.
        packed: one row of all tokens without padding; False: a right-padded batch.
        share_prompts: a prompt of several rows enters once (packed only).
        multiple_of: fill up the packed tokens to a multiple of this, with a row of its own that predicts nothing.
    """
    rows = _flatten(data)
    lengths = torch.tensor(rows.predicted, dtype=torch.int64)
    real = 0
    if packed:
        source, layout_rows, predict, real = _pack(rows, prompt_keys(data) if share_prompts else None, multiple_of)
        input_ids, position_ids = rows.tokens[source].unsqueeze(0), rows.positions[source].unsqueeze(0)
        layout = AttentionLayout.packed(layout_rows, device)
    else:
        input_ids, position_ids, predict = _pad(rows)
        layout = AttentionLayout.padded(input_ids.shape[1], device)
    label_source = [
        torch.arange(start + total - r, start + total)
        for start, total, r in zip(rows.start, rows.total, rows.predicted, strict=True)
    ]
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().to("cpu", torch.float32).repeat_interleave(lengths).to(device)
    return ModelInputs(
        input_ids=input_ids.to(device),
        position_ids=position_ids.to(device),
        layout=layout,
        predict_index=_cat(predict).to(device),
        labels=rows.tokens[_cat(label_source)].to(device),
        lengths=lengths,
        temperature=temperature,
        real=real,
    )


def empty_inputs(device: torch.device, tokens: int = 1) -> ModelInputs:
    """Some tokens and no prediction: lets a rank without rows take part in the collectives of a forward."""
    zero = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    none = torch.zeros(0, dtype=torch.int64)
    layout = AttentionLayout.packed([Row(0, tokens)], device)
    return ModelInputs(zero, zero.clone(), layout, none.to(device), none.to(device), none, 1.0)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0, dtype=torch.int64)


def _flatten(data: TensorDict) -> _Rows:
    ids = tu.check_jagged(data["input_ids"], "input_ids")
    total = tu.nested_lengths(ids).tolist()
    start = [0]
    for length in total[:-1]:
        start.append(start[-1] + length)
    tokens = tu.nested_values(ids).to("cpu", torch.int64)
    if "position_ids" in data.keys():
        positions = tu.nested_values(tu.check_jagged(data["position_ids"], "position_ids")).to("cpu", torch.int64)
        if positions.shape != tokens.shape:
            raise ContractError(
                f"position_ids of shape {tuple(positions.shape)} do not match {tuple(tokens.shape)} tokens; several "
                "position components (mRoPE) are not supported by this engine"
            )
    else:
        positions = _cat([torch.arange(length) for length in total])
    return _Rows(tokens, positions, start, total, response_lengths(data).tolist())


def _pack(rows: _Rows, keys: list[bytes] | None, multiple_of: int) -> tuple[Tensor, list[Row], list[Tensor], int]:
    """(positions of the packed tokens in the flattened rows, packed rows, prediction positions of each row, tokens
    before the filling ones).
    """
    members: dict[bytes | int, list[int]] = {}
    for i, r in enumerate(rows.predicted):
        if r > 0:  # nothing is predicted in an empty response: its row need not be computed
            members.setdefault(i if keys is None else keys[i], []).append(i)
    source: list[Tensor] = []
    layout: list[Row] = []
    predict: list[Tensor] = [torch.zeros(0, dtype=torch.int64)] * len(rows.predicted)
    position = 0

    def put(first: int, length: int, prefix: tuple[int, int] | None) -> int:
        nonlocal position
        source.append(torch.arange(first, first + length))
        layout.append(Row(position, length, prefix))
        position += length
        return position - length

    for group in members.values():
        if len(group) == 1:
            (i,) = group
            at = put(rows.start[i], rows.total[i] - 1, None) + rows.prompt_len(i) - 1
            predict[i] = torch.arange(at, at + rows.predicted[i])
            continue
        p = rows.prompt_len(group[0])
        prompt = put(rows.start[group[0]], p, None)
        for i in group:
            own = rows.predicted[i] - 1
            at = put(rows.start[i] + p, own, (prompt, prompt + p)) if own else 0
            # The first response token is predicted by the last prompt token, which the group shares.
            predict[i] = torch.cat([torch.tensor([prompt + p - 1]), torch.arange(at, at + own)])
    real = position
    if not layout:
        put(0, 1, None)
    if rest := -position % multiple_of:
        source.append(torch.zeros(rest, dtype=torch.int64))
        layout.append(Row(position, rest))
    return _cat(source), layout, predict, real


def _pad(rows: _Rows) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Right-padded ids and positions [B, L], prediction positions of each row in the flattened batch."""
    width = max(1, max(rows.total) - 1)
    ids = torch.zeros(len(rows.total), width, dtype=torch.int64)
    positions = torch.zeros_like(ids)
    predict = []
    for i, (start, total, r) in enumerate(zip(rows.start, rows.total, rows.predicted, strict=True)):
        kept = min(total, width)
        ids[i, :kept] = rows.tokens[start : start + kept]
        positions[i, :kept] = rows.positions[start : start + kept]
        at = i * width + rows.prompt_len(i) - 1
        predict.append(torch.arange(at, at + r))
    return ids, positions, predict
