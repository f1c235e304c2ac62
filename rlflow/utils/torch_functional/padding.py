"""Token sequences to one length and back, and the mask of a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.utils.errors import ConfigError, DataError

TRUNCATIONS = ("left", "right", "middle", "error")


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """[B, T] token ids -> mask that is 1 up to and including the first EOS (one id or several), 0 behind it."""
    eos = torch.as_tensor(eos_token, device=response_id.device).reshape(-1)
    is_eos = torch.isin(response_id, eos).long()
    seen_before = is_eos.cumsum(dim=-1) - is_eos
    return (seen_before == 0).to(dtype)


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False) -> Tensor:
    """[..., L] -> [..., max_seq_len]; longer ones are returned as they are."""
    missing = max_seq_len - tensors.shape[-1]
    if missing <= 0:
        return tensors
    return torch.nn.functional.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> Tensor:
    """Lists of different length -> [B, max(longest, max_length)], padded at the right."""
    width = max([max_length or 0, *map(len, response)])
    return torch.tensor([[*row, *[pad_token_id] * (width - len(row))] for row in response])


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, L] to width `max_length`.

    Args:
        input_ids, attention_mask: [B, L].
        max_length: the width of the result.
        pad_token_id: fills ids; the mask is filled with 0.
        left_pad: pad at the left.
        truncation: what longer rows lose: their "left", their "right", or the "middle", which keeps max_length // 2
            tokens of the start and the rest of the end; "error" refuses them.

    Raises:
        ConfigError: unknown `truncation`.
        DataError: too long with truncation="error".
    """
    if truncation not in TRUNCATIONS:
        raise ConfigError(f"truncation={truncation!r} is unknown; use one of {', '.join(TRUNCATIONS)}")
    length = input_ids.shape[-1]
    if length < max_length:
        return (
            pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad),
            pad_sequence_to_length(attention_mask, max_length, 0, left_pad),
        )
    if length == max_length:
        return input_ids, attention_mask
    if truncation == "error":
        raise DataError(
            f"{length} tokens are more than max_length={max_length}, and truncation=error refuses to cut. "
            "Try a larger max_length, or truncation=left | right | middle."
        )
    head = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
    tail = max_length - head
    return _cut(input_ids, head, tail), _cut(attention_mask, head, tail)


def _cut(tensor: Tensor, head: int, tail: int) -> Tensor:
    return torch.cat([tensor[..., :head], tensor[..., tensor.shape[-1] - tail :]], dim=-1)


def tokenize_and_postprocess_data(
    prompt: str, tokenizer: Any, max_length: int, pad_token_id: int, left_pad: bool = True, truncation: str = "error"
) -> tuple[Tensor, Tensor]:
    """`postprocess_data` of a text, tokenized without special tokens -> ids and mask [1, max_length]."""
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return postprocess_data(
        encoded["input_ids"], encoded["attention_mask"], max_length, pad_token_id, left_pad, truncation
    )


def remove_pad_token(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """Token lists of left-padded rows [B, L] (right-padded rows work too: the mask decides)."""
    return [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """What packed attention needs of a mask [B, L].

    Returns:
        (positions of the valid tokens in the flattened batch, cumulative row lengths int32 [B + 1], longest row).
    """
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    bounds = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return indices, bounds, int(lengths.max()) if lengths.numel() else 0


def expand_as_nested(tensor: Tensor, nested_tensor: Tensor) -> Tensor:
    """One value a row [B] -> a jagged tensor [B, j] with the rows of `nested_tensor`."""
    from rlflow.utils.nested import nested_lengths, nested_like

    return nested_like(torch.repeat_interleave(tensor, nested_lengths(nested_tensor)), nested_tensor)
