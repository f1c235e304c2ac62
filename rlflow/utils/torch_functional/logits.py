"""Log-probabilities, entropies and sums of squared probabilities from logits [..., V].

The training engines compute these from hidden states without holding the logits; these functions are for code that
has logits at hand, and the plain definitions that the engines are compared with.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

ENTROPY_CHUNK_ROWS = 2048


def gather_from_labels(data: Tensor, label: Tensor) -> Tensor:
    """data [..., V] at label [...] -> [...]."""
    return data.gather(-1, label.unsqueeze(-1)).squeeze(-1)


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """log softmax(logits) at the labels, [..., V] and [...] -> [...].

    flash-attn's fused cross entropy on a GPU that has it, else `logprobs_from_logits_v2`.

    Args:
        logits: [..., V].
        labels: int64 [...].
        inplace_backward: the fused kernel may overwrite the logits with their gradient. False whenever something else
            (the entropy) still needs them.
    """
    if logits.is_cuda and importlib.util.find_spec("flash_attn") is not None:
        return logprobs_from_logits_flash_attn(logits, labels, inplace_backward)
    return logprobs_from_logits_v2(logits, labels)


def logprobs_from_logits_flash_attn(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """`logprobs_from_logits` by the Triton cross entropy of flash-attn; ImportError without that package."""
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    flat = logits.reshape(-1, logits.shape[-1])
    losses, _ = cross_entropy_loss(flat, labels.reshape(-1), inplace_backward=inplace_backward)
    return -losses.view(labels.shape)


def logprobs_from_logits_naive(logits: Tensor, labels: Tensor) -> Tensor:
    """The definition: log softmax of everything, then the labels."""
    return gather_from_labels(torch.log_softmax(logits, dim=-1), labels)


def logprobs_from_logits_v2(logits: Tensor, labels: Tensor) -> Tensor:
    """The definition row by row, so that one row's intermediate values exist at a time.

    fp32 and fp64 take z_y - logsumexp(z); in half precision that difference cancels, so log softmax is used.
    """
    rows, flat_labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    if not rows.numel():
        return logits.new_zeros(labels.shape)
    if logits.dtype in (torch.float32, torch.float64):
        norm = torch.stack([torch.logsumexp(row, dim=-1) for row in rows])
        return (gather_from_labels(rows, flat_labels) - norm).view(labels.shape)
    picked = [torch.log_softmax(row, dim=-1)[label] for row, label in zip(rows, flat_labels, strict=True)]
    return torch.stack(picked).view(labels.shape)


def log_probs_from_logits_response(input_ids: Tensor, logits: Tensor, response_length: int) -> Tensor:
    """Log-probs [B, R] of the last R tokens; logits [B, L, V] at position t predict token t + 1."""
    return logprobs_from_logits(logits[:, -response_length - 1 : -1], input_ids[:, -response_length:])


def log_probs_from_logits_response_rmpad(
    input_ids: Tensor, attention_mask: Tensor, logits_rmpad: Tensor, response_length: int
) -> Tensor:
    """Log-probs [B, R] of the last R columns from logits [tokens, V] of the valid tokens only.

    Args:
        input_ids, attention_mask: [B, L].
        logits_rmpad: [attention_mask.sum(), V], rows one after the other.
        response_length: R; columns without a token, and a row's first token, have 0.
    """
    rows, width = input_ids.shape
    packed_ids = input_ids[attention_mask.bool()].unsqueeze(0)
    return log_probs_from_logits_all_rmpad(packed_ids, logits_rmpad, attention_mask, rows, width, response_length)


def log_probs_from_logits_all_rmpad(
    input_ids_rmpad: Tensor,
    logits_rmpad: Tensor,
    attention_mask: Tensor,
    batch_size: int,
    seqlen: int,
    response_length: int,
) -> Tensor:
    """As `log_probs_from_logits_response_rmpad`, from packed ids [1, tokens]."""
    valid = attention_mask.bool().reshape(batch_size, seqlen)
    labels = torch.roll(input_ids_rmpad.reshape(-1), shifts=-1, dims=0)
    packed = logprobs_from_logits(logits_rmpad, labels)
    padded = packed.new_zeros(batch_size, seqlen)
    padded[valid] = packed
    # The entry of a row's last token predicts the first of the next row: it lies at or behind the part cut out here,
    # and what precedes a column without a token is no prediction of it.
    response = padded[:, -response_length - 1 : -1]
    return torch.where(valid[:, -response_length:], response, torch.zeros_like(response))


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats over the last dimension: logsumexp(z) - sum softmax(z) z, in the dtype of the logits.

    A logit of -inf is an impossible token, adds nothing and gets no gradient.
    """
    # 0 * -inf is NaN, its limit 0. Replaced before the product: the backward pass would multiply by it again.
    finite = logits.masked_fill(logits.isneginf(), 0.0)
    return torch.logsumexp(logits, dim=-1) - (torch.softmax(logits, dim=-1) * finite).sum(dim=-1)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = ENTROPY_CHUNK_ROWS) -> Tensor:
    """`entropy_from_logits` in fp32, `chunk_size` rows of [N, V] at a time."""
    if not logits.shape[0]:
        return logits.new_zeros(logits.shape[:-1], dtype=torch.float32)
    return torch.cat([entropy_from_logits(part.float()) for part in logits.split(chunk_size)])


def calculate_sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """Sum of squared probabilities over the last dimension: exp(logsumexp(2z) - 2 logsumexp(z)), in (0, 1]."""
    return torch.exp(torch.logsumexp(2.0 * logits, dim=-1) - 2.0 * torch.logsumexp(logits, dim=-1))


def post_process_logits(
    input_ids: Tensor | None, logits: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Divide the logits by the temperature, in place. The other arguments are accepted and have no effect."""
    return logits.div_(temperature) if temperature != 1.0 else logits
