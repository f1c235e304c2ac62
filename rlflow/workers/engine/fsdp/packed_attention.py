"""Causal attention over many rows in one forward, without attention between rows.

A micro-batch reaches the model as one packed row of T tokens (or as a right-padded batch). Which tokens see each other
is given explicitly by an `AttentionLayout`, never guessed from position ids: a model whose attention did not receive
the layout raises instead of attending across rows.

Invariants
    - Token t attends to exactly the tokens of its own row up to itself, whatever the packing.
    - The layout is built once per micro-batch; a layer only gathers, calls SDPA on short padded batches, gathers back.
    - A prompt that several rows share may stand in the packed row once: its queries run once, its keys and values serve
      every row, and their gradients add up. Values and gradients are those of the unshared rows.
    - A sliding window counts within the row, shared prompt included; a row no longer than it is attended as without it.

Right padding needs no mask beside the causal one: a valid query never reaches behind itself, and what a padding query
computes is dropped on the way back and gets no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlflow.utils.attention_needs import AttentionCalls
from rlflow.utils.errors import ContractError
from rlflow.utils.torch_functional import soft_capped_attention, windowed_mask
from rlflow.workers.engine.fsdp.ulysses import over_sequence_ranks

ATTENTION_NAME = "rlflow_packed"
LAYOUT_KWARG = "attention_layout"

# A padded bucket may hold rows down to this share of its longest one: attention is a tenth of the work, so that some
# padding there is cheaper than one more round of small kernels.
MIN_FILL = 0.75


@dataclass(frozen=True)
class Row:
    """One row of the packed tokens: [start, start + length) of the packed axis, behind a shared prefix.

    `prefix` is the [start, stop) span that the row's tokens also attend to; None for a row that holds all its tokens.
    """

    start: int
    length: int
    prefix: tuple[int, int] | None = None


@dataclass(frozen=True)
class Bucket:
    """Rows of similar length, padded: S rows of `q_len` queries and `kv_len` keys.

    `mask` bool [S, 1, q_len, kv_len] says which keys a query sees; None: queries and keys are the same tokens, causal.
    `prefixes`: (first row, behind the last, start, stop) of rows that share the prefix [start, stop).
    """

    size: int
    q_len: int
    kv_len: int
    q_index: Tensor
    kv_index: Tensor
    q_inverse: Tensor
    kv_inverse: Tensor
    mask: Tensor | None
    prefixes: tuple[tuple[int, int, int, int], ...] = ()
    windowed: dict[int, Tensor] = field(default_factory=dict, compare=False)

    def mask_within(self, window: int | None) -> Tensor | None:
        """The mask of a layer with this window; built once a layout."""
        if window is None or window >= self.kv_len:
            return self.mask
        if window not in self.windowed:
            self.windowed[window] = windowed_mask(self.mask, self.q_len, window, self.q_index.device)
        return self.windowed[window]


@dataclass
class AttentionLayout:
    """Who attends to whom in one forward.

    Attributes:
        dense: the batch is right-padded [B, L].
        buckets: the padded batches of a packed forward; when dense one of which only the length counts.
        out_index: int64 [T], position of each packed token in the concatenated bucket outputs.
        cu_seqlens: int32 [rows + 1] for variable-length kernels; None when a prompt is shared.
        longest: length of the longest row, prefix included.
        calls: what attention was asked for with this layout; the model compares it with what its config means.
        sequence_group: ranks over which the tokens are split outside of attention (see ulysses.py); None: this one.
    """

    dense: bool
    longest: int
    buckets: tuple[Bucket, ...] = ()
    out_index: Tensor | None = None
    cu_seqlens: Tensor | None = None
    calls: AttentionCalls = field(default_factory=AttentionCalls, compare=False)
    sequence_group: Any = None

    @staticmethod
    def padded(width: int, device: torch.device | str = "cpu") -> AttentionLayout:
        """Layout of a right-padded batch [B, width]."""
        none = torch.zeros(0, dtype=torch.int64, device=device)
        bucket = Bucket(0, width, width, none, none, none, none, None)
        return AttentionLayout(dense=True, longest=width, buckets=(bucket,))

    @staticmethod
    def packed(rows: Sequence[Row], device: torch.device | str = "cpu") -> AttentionLayout:
        """Layout of packed rows; together they must cover the packed axis [0, T) once, in order."""
        position = 0
        for row in rows:
            if row.start != position or row.length < 1:
                raise ContractError(
                    f"packed rows must follow each other without gaps; {row} should start at {position}"
                )
            position += row.length
        buckets, out_index, base = [], torch.empty(position, dtype=torch.int64), 0
        for members in _group_rows(rows):
            bucket, tokens, slots = _make_bucket(members, position)
            out_index[tokens] = base + slots
            base += bucket.size * bucket.q_len
            buckets.append(_bucket_to(bucket, device))
        plain = all(row.prefix is None for row in rows)
        starts = torch.tensor([row.start for row in rows] + [position], dtype=torch.int32)
        return AttentionLayout(
            dense=False,
            longest=max(_kv_length(row) for row in rows),
            buckets=tuple(buckets),
            out_index=out_index.to(device),
            cu_seqlens=starts.to(device) if plain else None,
        )


def _kv_length(row: Row) -> int:
    return row.length + (row.prefix[1] - row.prefix[0] if row.prefix else 0)


def _group_rows(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one bucket have a prefix all or none, and lengths within `MIN_FILL` of the longest."""
    groups: list[list[Row]] = []
    for shared in (False, True):
        members = [row for row in rows if (row.prefix is not None) == shared]
        members.sort(key=lambda row: (-_kv_length(row), row.start))
        for row in members:
            first = groups[-1][0] if groups and (groups[-1][0].prefix is not None) == shared else None
            if first is not None and _kv_length(row) >= MIN_FILL * _kv_length(first):
                groups[-1].append(row)
            else:
                groups.append([row])
    return groups


def _make_bucket(rows: list[Row], total: int) -> tuple[Bucket, Tensor, Tensor]:
    """The bucket of `rows`; the packed positions of its queries and their slots in the padded query batch."""
    if rows[0].prefix is not None:  # those of one prefix side by side
        rows = sorted(rows, key=lambda row: (row.prefix, row.start))
    q_len, kv_len = max(row.length for row in rows), max(_kv_length(row) for row in rows)
    lengths = torch.tensor([row.length for row in rows]).unsqueeze(1)
    starts = torch.tensor([row.start for row in rows]).unsqueeze(1)
    q_range = torch.arange(q_len).unsqueeze(0)
    q_valid = q_range < lengths
    # Padding slots point at token 0: any finite value does, nobody reads the result.
    q_index = torch.where(q_valid, starts + q_range, 0)
    tokens, slots = q_index[q_valid], q_valid.flatten().nonzero().flatten()
    inverse = torch.full((total,), -1, dtype=torch.int64)
    inverse[tokens] = slots
    if rows[0].prefix is None:
        flat = q_index.flatten()
        return Bucket(len(rows), q_len, q_len, flat, flat, inverse, inverse, None), tokens, slots
    prefix = torch.tensor([row.prefix for row in rows])
    prefix_start, prefix_len = prefix[:, :1], prefix[:, 1:] - prefix[:, :1]
    kv_range = torch.arange(kv_len).unsqueeze(0)
    own = kv_range - prefix_len
    kv_index = torch.where(own < 0, prefix_start + kv_range, torch.where(own < lengths, starts + own, 0))
    kv_valid = (own >= 0) & (own < lengths)
    kv_inverse = torch.full((total,), -1, dtype=torch.int64)
    kv_inverse[kv_index[kv_valid]] = kv_valid.flatten().nonzero().flatten()
    mask = (kv_range.unsqueeze(1) <= (prefix_len + q_range).unsqueeze(2)).unsqueeze(1).contiguous()
    indices = q_index.flatten(), kv_index.flatten(), inverse, kv_inverse
    return Bucket(len(rows), q_len, kv_len, *indices, mask, _runs(rows)), tokens, slots


def _runs(rows: Sequence[Row]) -> tuple[tuple[int, int, int, int], ...]:
    """Rows of one prefix, which stand side by side: see `Bucket.prefixes`."""
    runs, first = [], 0
    for prefix, members in groupby(rows, key=lambda row: row.prefix):
        assert prefix is not None
        last = first + sum(1 for _ in members)
        runs.append((first, last, *prefix))
        first = last
    return tuple(runs)


def _bucket_to(bucket: Bucket, device: torch.device | str) -> Bucket:
    q_index, q_inverse = bucket.q_index.to(device), bucket.q_inverse.to(device)
    kv_index = q_index if bucket.kv_index is bucket.q_index else bucket.kv_index.to(device)
    kv_inverse = q_inverse if bucket.kv_inverse is bucket.q_inverse else bucket.kv_inverse.to(device)
    mask = None if bucket.mask is None else bucket.mask.to(device)
    indices = q_index, kv_index, q_inverse, kv_inverse
    return Bucket(bucket.size, bucket.q_len, bucket.kv_len, *indices, mask, bucket.prefixes)


class _Gather(torch.autograd.Function):
    """Rows `index` of x [T, ...] -> [S * length, ...], S rows of `length` slots.

    The gradient is a gather too, and a sum over rows for shared prefixes: `inverse` [T] is the slot of each token that
    fills one (-1: none, or several as part of a prefix), `prefixes` are those of the bucket. Padding slots carry no
    gradient by construction, so that dropping theirs is exact.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, length: int, prefixes: Sequence[tuple[int, int, int, int]]
    ) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.length, ctx.prefixes = length, prefixes
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        out = grad.index_select(0, inverse.clamp(min=0))
        out[inverse < 0] = 0
        rows = grad.reshape(-1, ctx.length, *grad.shape[1:])
        for first, last, start, stop in ctx.prefixes:
            summed = rows[first:last, : stop - start].sum(0, dtype=torch.float32)
            out[start:stop] += summed.to(grad.dtype)
        return out, None, None, None, None


class _GatherOut(torch.autograd.Function):
    """Rows `index` of padded outputs x [M, ...] -> [T, ...]; slots that nobody reads get gradient 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, index, grad), None


@over_sequence_ranks(LAYOUT_KWARG)
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that models call.

    Args:
        module: the calling attention module.
        query: [1, heads, T, d] packed or [B, heads, L, d] padded.
        key: [.., kv_heads, .., d]; heads must be a multiple of kv_heads.
        value: as `key`.
        attention_mask: must be None, the layout is the mask.
        scaling: factor of the scores; None: d ** -0.5.
        dropout: probability on the attention weights.
        sliding_window: a token attends to itself and the `sliding_window - 1` tokens before it; None: to all of them.
        softcap: scores become softcap * tanh(scores / softcap).
        kwargs: must hold the layout; anything else that changes the scores is refused.

    Returns:
        [B, T or L, heads, d] and None (no attention weights).
    """
    layout = kwargs.get(LAYOUT_KWARG)
    if layout is None:
        raise ContractError(
            f"{type(module).__name__} did not pass {LAYOUT_KWARG!r} to its attention, so that rows of a packed batch "
            "would see each other. This model cannot be trained by the FSDP engine of this version."
        )
    _refuse_unsupported(module, attention_mask, kwargs)
    layout.calls.count(sliding_window, softcap)
    scores = _Scores(scaling, dropout, softcap, query.shape[1] != key.shape[1])
    if layout.dense:
        out = scores.attend(query, key, value, layout.buckets[0].mask_within(sliding_window))
        return out.transpose(1, 2), None
    if query.shape[0] != 1 or query.shape[2] != layout.out_index.numel():
        raise ContractError(f"packed attention got {tuple(query.shape)} for {layout.out_index.numel()} packed tokens")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    varlen = _flash_varlen(q) if layout.cu_seqlens is not None and not (softcap and dropout) else None
    if varlen is not None:
        cu, longest = layout.cu_seqlens, layout.longest
        options = _flash_options(sliding_window, softcap, longest)
        out = varlen(
            q, k, v, cu, cu, longest, longest, dropout_p=dropout, softmax_scale=scaling, causal=True, **options
        )
        return out.unsqueeze(0), None
    outputs = [_attend(bucket, q, k, v, scores, sliding_window) for bucket in layout.buckets]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _GatherOut.apply(joined, layout.out_index).unsqueeze(0), None


@dataclass(frozen=True)
class _Scores:
    """How padded queries and keys become weights."""

    scaling: float | None
    dropout: float
    softcap: float | None
    gqa: bool

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[S, heads, q, d] in and out; without a mask queries and keys are the same tokens, causal."""
        if self.softcap is not None:
            return soft_capped_attention(
                query, key, value, cap=self.softcap, scale=self.scaling, mask=mask, dropout=self.dropout
            )
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scaling,
            dropout_p=self.dropout,
            enable_gqa=self.gqa,
        )


def _attend(bucket: Bucket, q: Tensor, k: Tensor, v: Tensor, scores: _Scores, window: int | None) -> Tensor:
    """Attention of one bucket: packed [T, heads, d] in, padded [S * q_len, heads, d] out."""

    def padded(x: Tensor, index: Tensor, inverse: Tensor, length: int, *prefixes: tuple[int, int, int, int]) -> Tensor:
        rows = _Gather.apply(x, index, inverse, length, prefixes)
        return rows.view(bucket.size, length, *x.shape[1:]).transpose(1, 2)

    out = scores.attend(
        padded(q, bucket.q_index, bucket.q_inverse, bucket.q_len),
        padded(k, bucket.kv_index, bucket.kv_inverse, bucket.kv_len, *bucket.prefixes),
        padded(v, bucket.kv_index, bucket.kv_inverse, bucket.kv_len, *bucket.prefixes),
        bucket.mask_within(window),
    )
    return out.transpose(1, 2).reshape(bucket.size * bucket.q_len, *q.shape[1:])


def _flash_varlen(query: Tensor) -> Any:
    """flash-attn's variable-length kernel where it is installed and can run, else None."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def _flash_options(window: int | None, softcap: float | None, longest: int) -> dict[str, Any]:
    """flash-attn's arguments for a window (its left side counts the tokens before the query) and a soft cap."""
    options: dict[str, Any] = {}
    if window is not None and window < longest:
        options["window_size"] = (window - 1, 0)
    if softcap is not None:
        options["softcap"] = softcap
    return options


# Arguments with which models ask for other scores than the above.
_SCORE_CHANGING = ("s_aux", "sinks", "position_bias", "alibi", "head_mask", "block_mask")


def _refuse_unsupported(module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    changed = [name for name in _SCORE_CHANGING if kwargs.get(name) is not None]
    if mask is not None:
        changed.append("attention_mask")
    if changed:
        raise ContractError(
            f"{type(module).__name__} asks for attention with {', '.join(changed)}, which packed attention does not "
            "implement; the result would silently be another model's."
        )


def register_attention() -> None:
    """Make `packed_attention` selectable by `attn_implementation=ATTENTION_NAME`.

    No mask function is registered for the name, so that transformers builds no mask at all.
    """
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)
