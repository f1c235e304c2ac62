"""How a batch is cut: micro-batches under a token budget, counts of the loss, and the way back to row order.

Invariants
    - The token budget is a hard cap: no micro-batch holds more tokens than it, whatever the balance.
    - All data-parallel ranks run the same number of micro-batches; a rank that needs fewer runs empty ones, because
      every forward and backward is a collective.
    - Outputs come back in row order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError
from rlflow.utils.seqlen_balancing import LINEAR_WORK_PER_TOKEN, calculate_workload, restore_dynamic_batch
from rlflow.utils.token_budget import Item, fill_up, max_over_ranks, pad_parts, split_by_budget, split_padded
from rlflow.workers.engine.options import BatchOptions


@dataclass
class MicroBatch:
    """One forward: `rows` of the batch (ascending) and their data; None for a rank that only takes part."""

    rows: list[int] = field(default_factory=list)
    data: TensorDict | None = None


def prepare_micro_batches(
    data: TensorDict,
    options: BatchOptions,
    *,
    dp_group: Any = None,
    prompt_keys: Callable[[TensorDict], list[bytes]] | None = None,
    prompt_lengths: Sequence[int] | None = None,
    linear_work: int = LINEAR_WORK_PER_TOKEN,
    sp_size: int = 1,
) -> list[MicroBatch]:
    """Cut a batch.

    Args:
        data: rows with jagged `input_ids`.
        options: sizes and layout.
        dp_group: ranks that must run equally many micro-batches; None: only this one.
        prompt_keys: equal keys for rows of equal prompts; needed with `share_prompts`.
        prompt_lengths: prompt tokens of each row; needed with `share_prompts`.
        linear_work: work of a token in units of one attention pair (6 x hidden size for the usual transformer).
        sp_size: ranks that share the tokens of a forward; the budget of a micro-batch is theirs together.

    Raises:
        ContractError: a row alone is over the budget.
    """
    lengths = tu.nested_lengths(tu.check_jagged(data["input_ids"], "input_ids")).tolist()
    if not options.use_dynamic_bsz:
        size = options.micro_batch_size_per_gpu or 1
        parts = [list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size)]
        parts = pad_parts(parts, max_over_ranks(len(parts), dp_group))
    else:
        budget = (options.max_token_len_per_gpu or 0) * sp_size
        _check_rows_fit(lengths, budget, sp_size)
        if options.use_remove_padding:
            keys = prompt_keys(data) if options.share_prompts and prompt_keys else None
            items = _items(lengths, budget, keys, prompt_lengths, linear_work)
            parts = split_by_budget(items, budget)
            parts = fill_up(parts, items, budget, max_over_ranks(len(parts), dp_group))
        else:
            parts = split_padded(lengths, budget)
            parts = pad_parts(parts, max_over_ranks(len(parts), dp_group))
    if len(parts) == 1 and len(parts[0]) == len(lengths):
        return [MicroBatch(parts[0], data)]
    return [MicroBatch(rows, tu.index_select_tensor_dict(data, rows)) if rows else MicroBatch() for rows in parts]


def _check_rows_fit(lengths: Sequence[int], budget: int, sp_size: int) -> None:
    longest = max(lengths, default=0)
    if longest > budget:
        over = f" x {sp_size} ranks of a sequence" if sp_size > 1 else ""
        raise ContractError(
            f"row {list(lengths).index(longest)} has {longest} tokens, over max_token_len_per_gpu={budget // sp_size}"
            f"{over} tokens a micro-batch; set ppo_max_token_len_per_gpu (log_prob_max_token_len_per_gpu) to at least "
            f"{-(-longest // sp_size)}, or shorten prompts or responses"
        )


def _items(
    lengths: Sequence[int],
    budget: int,
    keys: list[bytes] | None,
    prompt_lengths: Sequence[int] | None,
    linear_work: int,
) -> list[Item]:
    """One item per row, or per group of rows with one prompt; a group over the budget is cut."""
    if keys is None or prompt_lengths is None:
        return [Item((i,), n, calculate_workload(n, linear_work)) for i, n in enumerate(lengths)]
    groups: dict[bytes, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    items = []
    for rows in groups.values():
        prompt = prompt_lengths[rows[0]]
        members: list[int] = []
        tokens = prompt
        for i in rows:
            own = lengths[i] - prompt
            if members and tokens + own > budget:
                items.append(_shared_item(members, tokens, lengths, linear_work))
                members, tokens = [], prompt
            members.append(i)
            tokens += own
        items.append(_shared_item(members, tokens, lengths, linear_work))
    return items


def _shared_item(rows: list[int], tokens: int, lengths: Sequence[int], linear_work: int) -> Item:
    return Item(tuple(rows), tokens, linear_work * tokens + sum(lengths[i] ** 2 for i in rows))


# ---- counts and order --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossCounts:
    """Denominators of a mini-batch over all data-parallel ranks.

    Attributes:
        batch_num_tokens: tokens with mask 1.
        global_batch_size: rows with at least one such token; padding and masked rows weigh nothing.
        dp_size: ranks over which gradients are averaged.
    """

    batch_num_tokens: int
    global_batch_size: int
    dp_size: int

    def beside(self, data: TensorDict, device: torch.device) -> TensorDict:
        """A copy of a micro-batch on the device, with these counts."""
        data = data.to(device) if device.type != "cpu" else data.copy()
        return tu.assign_non_tensor_whole(data, dataclasses.asdict(self))


def loss_mask(data: TensorDict) -> Tensor | None:
    """The mask that the loss uses, jagged or dense; None for data without one."""
    for name in ("response_mask", "loss_mask"):
        if name in data.keys():
            return data[name]
    return None


def count_loss_tokens(data: TensorDict, dp_group: Any, dp_size: int, device: torch.device) -> LossCounts:
    """Counts of a mini-batch, summed over `dp_group` in one message. *Collective.*"""
    mask = loss_mask(data)
    if mask is None:
        raise ContractError("a loss needs response_mask (or loss_mask) in the batch to know which tokens count")
    per_row = tu.nested_to_padded(mask).sum(-1) if tu.is_nested(mask) else mask.sum(-1)
    counts = torch.stack([per_row.sum(), (per_row > 0).sum()]).to(device, torch.int64)
    if dp_group is not None and dp_size > 1:
        dist.all_reduce(counts, group=dp_group)
    tokens, rows = counts.tolist()
    return LossCounts(tokens, rows, dp_size)


def restore_rows(parts: Sequence[tuple[Sequence[int], Tensor, Tensor]]) -> Tensor | None:
    """Jagged field in row order from (rows, values [sum(lengths)], lengths) of each micro-batch; None without parts."""
    if not parts:
        return None
    joined = tu.nested_from_values(torch.cat([part[1] for part in parts]), torch.cat([part[2] for part in parts]))
    # One micro-batch holds its rows in order already.
    return joined if len(parts) == 1 else restore_dynamic_batch(joined, [part[0] for part in parts])
