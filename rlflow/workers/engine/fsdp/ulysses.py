"""Ulysses sequence parallelism: the tokens of a forward are split over the ranks of a group (Jacobs et al. 2023).

    packed tokens [T] --slice--> [T / sp] a rank: embedding, projections, MLP, head
                       attention: all-to-all to [T, heads / sp], `packed_attention`, all-to-all back to [T / sp, heads]
    predictions      --gather--> [N] on every rank, where the loss is computed

Invariants
    - The ranks of a group get the same rows and build the same inputs; each keeps its slice of them.
    - Attention sees all tokens of a row in order, so that layouts (shared prompts too) need no change.
    - Every rank computes the loss of the whole micro-batch. The sharded gradient is an average over all ranks, of which
      sp hold parts of one sum: the gather's backward multiplies by sp.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlflow.utils.errors import ConfigError, ContractError

if TYPE_CHECKING:
    from rlflow.workers.engine.fsdp.inputs import ModelInputs

Attention = Callable[..., tuple[Tensor, None]]

# Tensors that models hand to their attention and that say nothing about its scores.
_HARMLESS = ("position_ids", "cache_position")


@dataclass(frozen=True)
class SequencePart:
    """Which predictions of a forward are made on this rank, and how all of them come together.

    Attributes:
        group: the ranks that share the forward.
        mine: int64 [n], predictions of this rank, ascending by row order.
        slots: int64 [N], place of each prediction in the gathered buffers [sp x width].
        width: the largest n of any rank.
    """

    group: Any
    mine: Tensor
    slots: Tensor
    width: int


def check_heads(config: Any, size: int) -> None:
    """Refuse a model whose heads cannot be split over `size` ranks.

    Raises:
        ConfigError: heads are no multiple of the ranks, or key/value heads neither a multiple nor a divisor of them.
    """
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % size or (kv_heads % size and size % kv_heads):
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        raise ConfigError(
            f"ulysses_sequence_parallel_size={size} cannot split {heads} attention heads with {kv_heads} key/value "
            f"heads over its ranks; this model allows {', '.join(map(str, fitting))}"
        )


# ---- inputs and outputs ------------------------------------------------------------------------------------------


def split_sequence(inputs: ModelInputs, group: Any) -> ModelInputs:
    """The inputs of this rank: its slice of the tokens, and the predictions that are made there.

    Args:
        inputs: packed, with a number of tokens that the ranks divide; the same on all ranks of `group`.
        group: the process group of one sequence.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    total = inputs.input_ids.shape[1]
    if inputs.layout.dense or total % size:
        raise ContractError(f"sequence parallelism over {size} ranks needs packed tokens in equal slices, got {total}")
    length = total // size
    owner = inputs.predict_index // length
    counts = torch.bincount(owner, minlength=size)
    width = int(counts.max())
    # Predictions of one rank keep their order, so that a stable sort puts each at its place in its owner's buffer.
    order = torch.argsort(owner, stable=True)
    first = counts.cumsum(0) - counts
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) - first[owner[order]]
    mine = (owner == rank).nonzero().flatten()
    part = slice(rank * length, (rank + 1) * length)
    temperature = inputs.temperature
    inputs.layout.sequence_group = group
    return dataclasses.replace(
        inputs,
        input_ids=inputs.input_ids[:, part],
        position_ids=inputs.position_ids[:, part],
        predict_index=inputs.predict_index[mine] - rank * length,
        labels=inputs.labels[mine],
        temperature=temperature[mine] if isinstance(temperature, Tensor) else temperature,
        real=min(max(inputs.real - rank * length, 0), length),
        sequence=SequencePart(group, mine, owner * width + place, width),
    )


def gather_predictions(values: Tensor, part: SequencePart) -> Tensor:
    """Outputs of all predictions [N], in row order, from those of each rank [n]. *Collective over the group.*"""
    return _GatherPredictions.apply(values, part)


class _GatherPredictions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, part: SequencePart) -> Tensor:
        ctx.part = part
        size = dist.get_world_size(part.group)
        padded = values.new_zeros(part.width)
        padded[: len(values)] = values
        everything = values.new_empty(size * part.width)
        if part.width:
            dist.all_gather(list(everything.chunk(size)), padded, group=part.group)
        return everything.index_select(0, part.slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        part: SequencePart = ctx.part
        return grad.index_select(0, part.mine) * dist.get_world_size(part.group), None


# ---- attention ---------------------------------------------------------------------------------------------------


def over_sequence_ranks(layout_kwarg: str) -> Callable[[Attention], Attention]:
    """Decorator of an attention function: with a sequence group in its layout it runs on all tokens of this rank's
    heads. Without a group it runs as it is.
    """

    def decorator(attention: Attention) -> Attention:
        @functools.wraps(attention)
        def run(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
        ) -> tuple[Tensor, None]:
            group = getattr(kwargs.get(layout_kwarg), "sequence_group", None)
            if group is None:
                return attention(module, query, key, value, attention_mask, **kwargs)
            _refuse_per_head_tensors(module, kwargs)
            query, key, value = scatter_heads(query, key, value, group)
            out, _ = attention(module, query, key, value, attention_mask, **kwargs)
            return _gather_heads(out, group), None

        return run

    return decorator


def _refuse_per_head_tensors(module: nn.Module, kwargs: dict[str, Any]) -> None:
    tensors = [name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in _HARMLESS]
    if tensors:
        raise ContractError(
            f"{type(module).__name__} gives its attention {', '.join(tensors)}, of which a rank would need the part of "
            "its own heads or tokens; set ulysses_sequence_parallel_size=1 for this model"
        )


def scatter_heads(query: Tensor, key: Tensor, value: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """[1, heads, T / sp, d] of this rank's tokens -> [1, heads / sp, T, d] of its heads.

    Fewer key/value heads than ranks are repeated, so that each rank has the one that its queries read.
    """
    size = dist.get_world_size(group)
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ContractError(f"{heads} heads with {kv_heads} key/value heads do not split over {size} sequence ranks")
    if kv_heads < size:
        key, value = (x.repeat_interleave(size // kv_heads, dim=1) for x in (key, value))
    return _scatter(query, group, size), _scatter(key, group, size), _scatter(value, group, size)


def _scatter(x: Tensor, group: Any, size: int) -> Tensor:
    _, heads, tokens, dim = x.shape
    received = _AllToAll.apply(x.reshape(size, heads // size, tokens, dim), group)
    return received.transpose(0, 1).reshape(1, heads // size, size * tokens, dim)


def _gather_heads(out: Tensor, group: Any) -> Tensor:
    """[1, T, heads / sp, d] of this rank's heads -> [1, T / sp, heads, d] of its tokens."""
    size = dist.get_world_size(group)
    _, tokens, heads, dim = out.shape
    received = _AllToAll.apply(out.reshape(size, tokens // size, heads, dim), group)
    return received.transpose(0, 1).reshape(1, tokens // size, size * heads, dim)


class _AllToAll(torch.autograd.Function):
    """Part r of x [sp, ...] goes to rank r; part r of the result came from there. Its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad, ctx.group), None


def _exchange(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out
