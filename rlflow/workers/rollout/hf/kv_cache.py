"""Keys and values of the running sequences, and the attention over them.

Invariants
    - A sequence owns one slot; the `n` running sequences own the slots `0..n-1`, so that a decode step reads a plain
      slice of the cache. Whoever leaves is replaced by the last one (`move`).
    - The memory is reserved once and written in place; nothing is concatenated while tokens are generated. Pages are
      touched only when a sequence reaches them, so an unused slot costs no memory.
    - Every byte is finite: masked positions are multiplied by a probability of zero, and 0 * NaN is NaN.

One forward of the model is described by a step object, which travels to the attention function as the keyword
`kv_step`:

    DecodeStep    one token of each running sequence       query [n, heads, 1, d]
    PrefillStep   whole prompts behind one another         query [1, heads, tokens, d]

The attention function is registered with transformers under `ATTENTION_NAME`; a model whose attention needs anything
that it does not do (sinks, chunks, ...) is refused by `check_attention_support`. A layer with a sliding window keeps
all keys like any other and looks at the last ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlflow.utils.attention_needs import AttentionCalls, unsupported_attention
from rlflow.utils.errors import ConfigError
from rlflow.utils.torch_functional import soft_capped_attention, windowed_mask

ATTENTION_NAME = "rlflow_slots"

# Arguments that models hand to an attention function when they need more than this engine does.
_UNSUPPORTED_ARGUMENTS = ("s_aux", "position_bias", "cu_seq_lens_q")


@dataclass(frozen=True)
class KVShape:
    """Sizes of a model's cache: `head_dim` values for each of `kv_heads` heads in each of `layers` layers."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def from_config(cls, config: Any) -> KVShape:
        """Read the sizes from a Hugging Face config."""
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, head_dim)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


class SlotKVCache:
    """Keys and values, [2, layers, slots, kv_heads, max_len, head_dim].

    Args:
        slots: sequences that can run at the same time.
        max_len: tokens of one sequence at most.
    """

    def __init__(self, shape: KVShape, slots: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.slots, self.max_len = shape, slots, max_len
        self._kv = _lazy_zeros((2, shape.layers, slots, shape.kv_heads, max_len, shape.head_dim), dtype, device)
        self.keys = [self._kv[0, layer] for layer in range(shape.layers)]
        self.values = [self._kv[1, layer] for layer in range(shape.layers)]
        # Rows of head_dim values: a token's keys go to rows slot * kv_heads * max_len + head * max_len + position.
        self._key_rows = [keys.view(-1, shape.head_dim) for keys in self.keys]
        self._value_rows = [values.view(-1, shape.head_dim) for values in self.values]
        self._head_rows = np.arange(shape.kv_heads, dtype=np.int64) * max_len

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored keys and values."""
        return self._kv.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._kv.device

    def rows_of(self, slots: np.ndarray, positions: np.ndarray) -> Tensor:
        """Cache rows of tokens: int64 [tokens * kv_heads], ordered by token, then by head."""
        first = slots * (self.shape.kv_heads * self.max_len) + positions
        return torch.from_numpy((first[:, None] + self._head_rows).reshape(-1)).to(self.device)

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [tokens * kv_heads, head_dim] at `rows`."""
        self._key_rows[layer].index_copy_(0, rows, keys)
        self._value_rows[layer].index_copy_(0, rows, values)

    def copy(self, source: int, targets: list[int], length: int) -> None:
        """Give the first `length` tokens of slot `source` to the slots `targets` too."""
        if length and targets:
            self._kv[:, :, targets, :, :length] = self._kv[:, :, source, None, :, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """Put the sequence of slot `source` (`length` tokens) into slot `target`."""
        self._kv[:, :, target, :, :length] = self._kv[:, :, source, :, :length]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose pages the kernel provides on first use; `torch.zeros` would touch all of them at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


@dataclass(frozen=True)
class Scores:
    """How a layer turns queries and keys into weights.

    Attributes:
        scaling: factor of the scores; None: head_dim ** -0.5.
        window: keys that a token sees, itself included; None: all earlier ones.
        softcap: scores become softcap * tanh(scores / softcap).
    """

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """[b, heads, q, d] in and out; `causal` only without a mask and for as many queries as keys."""
        if self.softcap is None:
            gqa = query.shape[1] != key.shape[1]
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=causal, scale=self.scaling, enable_gqa=gqa
            )
        if mask is None and not causal:
            mask = torch.zeros((), dtype=torch.float32, device=query.device).view(1, 1, 1, 1)
        return soft_capped_attention(query, key, value, cap=self.softcap, scale=self.scaling, mask=mask)


class DecodeStep:
    """One new token for each of the slots `0..n-1`.

    Args:
        lengths: int64 [n], tokens already cached of each slot = position of the new token.
    """

    def __init__(self, cache: SlotKVCache, lengths: np.ndarray) -> None:
        self.cache = cache
        self.rows = cache.rows_of(np.arange(len(lengths), dtype=np.int64), lengths)
        self.longest = int(lengths.max()) + 1
        self.calls = AttentionCalls()
        self._lengths = lengths
        self._views: dict[int | None, tuple[int, Tensor | None]] = {}

    def _view(self, window: int | None) -> tuple[int, Tensor | None]:
        """The first key that any slot sees through this window, and the mask from there on; made once a step."""
        if window is not None and window >= self.longest:
            window = None
        if window not in self._views:
            first = 0 if window is None else max(0, int(self._lengths.min()) + 1 - window)
            self._views[window] = first, self._mask(first, window)
        return self._views[window]

    def _mask(self, first: int, window: int | None) -> Tensor | None:
        """0 where a slot has a token that it sees, -inf elsewhere: [n, 1, 1, longest - first]; None: all see all."""
        lengths = self._lengths
        if int(lengths.min()) + 1 == self.longest:
            return None
        position = np.arange(first, self.longest)
        seen = position <= lengths[:, None]
        if window is not None:
            seen &= position > lengths[:, None] - window
        mask = np.where(seen, np.float32(0), np.float32("-inf"))
        return torch.from_numpy(mask)[:, None, None].to(self.cache.device, self.cache.dtype)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Store the new token, then attend to all of the sequence. Returns [n, 1, heads, head_dim]."""
        n, heads, _, dim = query.shape
        kv_heads = key.shape[1]
        self.cache.write(layer, self.rows, key.reshape(-1, dim), value.reshape(-1, dim))
        first, mask = self._view(scores.window)
        keys = self.cache.keys[layer][:n, :, first : self.longest]
        values = self.cache.values[layer][:n, :, first : self.longest]
        # The query heads that share a key head become the query positions of that head: grouped-query attention
        # without repeating a single key, and without any causal order among them to respect.
        grouped = query.reshape(n, kv_heads, heads // kv_heads, dim)
        out = scores.attend(grouped, keys, values, mask, causal=False)
        return out.reshape(n, 1, heads, dim)


class PrefillStep:
    """Prompts packed behind one another, each into a slot of its own that is empty so far.

    Args:
        slots: the slot of each prompt.
        lengths: tokens of each prompt, ascending: prompts of one length share an attention call.
    """

    def __init__(self, cache: SlotKVCache, slots: list[int], lengths: list[int]) -> None:
        self.cache = cache
        positions = [np.arange(length, dtype=np.int64) for length in lengths]
        self.positions = np.concatenate(positions)
        self.rows = cache.rows_of(np.repeat(np.asarray(slots, dtype=np.int64), lengths), self.positions)
        self.calls = AttentionCalls()
        self._windowed: dict[tuple[int, int], Tensor] = {}
        self.groups: list[tuple[int, int]] = []  # (prompts, length)
        for length in lengths:
            if self.groups and self.groups[-1][1] == length:
                self.groups[-1] = (self.groups[-1][0] + 1, length)
            else:
                self.groups.append((1, length))

    def _mask(self, length: int, window: int | None) -> Tensor | None:
        """Which keys the tokens of a prompt see through this window; None: all earlier ones."""
        if window is None or window >= length:
            return None
        if (length, window) not in self._windowed:
            self._windowed[length, window] = windowed_mask(None, length, window, self.cache.device)
        return self._windowed[length, window]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Store all tokens; each attends to its own prompt up to itself. Returns [1, tokens, heads, head_dim]."""
        _, heads, tokens, dim = query.shape
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, dim]
        self.cache.write(layer, self.rows, key.reshape(-1, dim), value.reshape(-1, dim))
        out, start = [], 0
        for prompts, length in self.groups:
            stop = start + prompts * length
            q, k, v = (x[start:stop].view(prompts, length, -1, dim).transpose(1, 2) for x in (query, key, value))
            mask = self._mask(length, scores.window)
            part = scores.attend(q, k, v, mask, causal=mask is None)
            out.append(part.transpose(1, 2).reshape(stop - start, heads, dim))
            start = stop
        joined = out[0] if len(out) == 1 else torch.cat(out)
        return joined.view(1, tokens, heads, dim)


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kv_step: DecodeStep | PrefillStep | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention interface of transformers: query [b, heads, q, d] -> [b, q, heads, d]."""
    wanted = [name for name in _UNSUPPORTED_ARGUMENTS if kwargs.get(name) is not None]
    if wanted or kv_step is None:
        raise ConfigError(
            f"{type(module).__name__} asks for attention with {', '.join(wanted) or 'no step'}, which the hf rollout "
            "engine does not do. Serve this model with another engine (rollout.name)."
        )
    kv_step.calls.count(sliding_window, softcap)
    scores = Scores(scaling, sliding_window, softcap)
    return kv_step.attend(module.layer_idx, query, key, value, scores), None  # type: ignore[arg-type]


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers. No mask function: the steps bring their own masks."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, slot_attention)


def check_attention_support(config: Any) -> None:
    """Refuse a model whose attention the engine does not do.

    Raises:
        ConfigError: names the config entry and its value.
    """
    reasons = unsupported_attention(config)
    if reasons:
        raise ConfigError(
            f"The hf rollout engine cannot serve this {config.model_type} model: {'; '.join(reasons)}. It keeps every "
            "token of a sequence and does causal attention over all or the last of them. Take a model without it, or "
            "another engine (rollout.name)."
        )
