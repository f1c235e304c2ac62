"""Log-probabilities and entropies of tokens straight from hidden states, without the logits of all tokens.

With z = (h W^T + b) / T of one token (or c tanh((h W^T + b) / c) / T, soft-capped), p = softmax(z), y its label:
    log-prob               l = z_y - logsumexp(z)          dl/dz = onehot(y) - p
    entropy                H = -sum_v p_v log p_v          dH/dz = -p (log p + H)
    squared probabilities  S = sum_v p_v^2                 value only: a baseline's weight, nothing is trained by it

Invariants
    - At most `chunk` rows of logits exist at a time, in the forward and in the backward (which computes them again,
      unless it is told to keep their log-softmax: fp32 [N, V] between forward and backward).
    - The matrix product runs in the dtype of hidden and weight, everything behind it in fp32; results are fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlflow.workers.engine.fsdp import cross_entropy_kernel
from rlflow.workers.engine.fsdp.cross_entropy_kernel import CrossEntropy, flash_cross_entropy

# Elements of one logits chunk. On a CPU it stays under 32 MiB in fp32, above which the C allocator returns memory to
# the system after every use and pays for its pages again; a GPU wants matrix products large enough to fill it.
CPU_CHUNK_ELEMENTS = 7 * 2**20
GPU_CHUNK_ELEMENTS = 2**27
MIN_CHUNK_ROWS = 32


class TokenStats(NamedTuple):
    """What the distribution of each token says; fp32 [N] each, None where it was not asked for.

    Fields:
        log_probs: of the labels.
        entropy: in nats.
        sum_pi_squared: sum of the squared probabilities, in (0, 1]; carries no gradient.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    sum_pi_squared: Tensor | None = None


def chunk_rows(vocab_size: int, device: torch.device, limit: int | None = None) -> int:
    """Rows of logits to hold at once; `limit` caps it (`entropy_from_logits_chunk_size`)."""
    elements = GPU_CHUNK_ELEMENTS if device.type == "cuda" else CPU_CHUNK_ELEMENTS
    rows = max(MIN_CHUNK_ROWS, elements // vocab_size)
    return rows if limit is None else max(1, min(rows, limit))


class _Head(NamedTuple):
    """How hidden states [n, h] become logits [n, V]."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None

    def logits(self, hidden: Tensor, inv_temperature: Tensor | None) -> Tensor:
        """Logits, divided by the temperature."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        if self.softcap is not None:
            logits = logits.float().div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if inv_temperature is None else logits.float().mul_(inv_temperature.unsqueeze(1))

    def slope(self, logits: Tensor | None, inv_temperature: Tensor | None) -> Tensor | None:
        """d logits / d(h W^T + b), fp32 [n, V] or [n, 1]; None for 1. Only a soft cap looks at the logits."""
        scale = None if inv_temperature is None else inv_temperature.unsqueeze(1)
        if self.softcap is None or logits is None:
            return scale
        capped = logits / self.softcap if scale is None else logits / (scale * self.softcap)
        slope = capped.square_().neg_().add_(1)
        return slope if scale is None else slope.mul_(scale)


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        inv_temperature: Tensor | None,
        with_entropy: bool,
        with_sum_pi_squared: bool,
        chunk: int,
        kernel: CrossEntropy | None,
        softcap: float | None,
        keep: bool,
        compiled: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        n, head = hidden.shape[0], _Head(weight, bias, softcap)
        log_probs = torch.empty(n, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(log_probs) if with_entropy else None
        squares = torch.empty_like(log_probs) if with_sum_pi_squared else None
        sums = _maybe_compiled(_distribution_sums, compiled)
        ctx.kept = {}
        for start in range(0, n, chunk):
            part = slice(start, start + chunk)
            inv_t = None if inv_temperature is None else inv_temperature[part]
            if kernel is not None:
                logits = head.logits(hidden[part], inv_t)
                log_probs[part] = cross_entropy_kernel.log_probs(kernel, logits, labels[part])
                continue
            log_p = _log_softmax(head.logits(hidden[part], inv_t))
            log_probs[part] = log_p.gather(1, labels[part].unsqueeze(1)).squeeze(1)
            if keep:
                ctx.kept[start] = log_p
            if entropy is not None or squares is not None:
                chunk_entropy, chunk_squares = sums(log_p, with_entropy, with_sum_pi_squared, in_place=not keep)
                if entropy is not None:
                    entropy[part] = chunk_entropy
                if squares is not None:
                    squares[part] = chunk_squares
        ctx.save_for_backward(hidden, weight, bias, labels, inv_temperature, entropy)
        ctx.chunk, ctx.kernel, ctx.softcap, ctx.compiled = chunk, kernel, softcap, compiled
        ctx.set_materialize_grads(False)
        if squares is not None:
            ctx.mark_non_differentiable(squares)
        return log_probs, entropy, squares

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: None) -> tuple[Any, ...]:
        hidden, weight, bias, labels, inv_temperature, entropy = ctx.saved_tensors
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 12
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        head = _Head(weight, bias, ctx.softcap)
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        # Sums over chunks are kept in fp32: in bf16 every further chunk would lose its last bits.
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if need_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if need_bias else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            inv_t = None if inv_temperature is None else inv_temperature[part]
            grad_l = None if grad_log_probs is None else grad_log_probs[part]
            # A kept log-softmax saves the product, unless a soft cap needs the logits for its slope.
            log_p = ctx.kept.pop(start, None)
            logits = head.logits(hidden[part], inv_t) if log_p is None or ctx.softcap is not None else None
            slope = head.slope(logits, inv_t)
            if ctx.kernel is not None:
                assert grad_l is not None and logits is not None  # log-probs are the only output of this way
                grad_logits = cross_entropy_kernel.grad_logits(ctx.kernel, logits, labels[part], grad_l)
            else:
                if logits is not None and log_p is None:
                    log_p = _log_softmax(logits)
                del logits  # so that at most two tensors of this size exist
                grad_logits = _maybe_compiled(_grad_logits, ctx.compiled)(
                    log_p,
                    labels[part],
                    grad_l,
                    None if grad_entropy is None else grad_entropy[part],
                    None if entropy is None else entropy[part],
                )
                del log_p
            if slope is not None:
                grad_logits = grad_logits.float().mul_(slope)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad_logits @ weight
            if grad_weight is not None:
                if hidden.dtype == torch.float32:
                    grad_weight.addmm_(grad_logits.t(), hidden[part])
                else:
                    grad_weight += grad_logits.t() @ hidden[part]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 9,
        )


@functools.cache
def _maybe_compiled(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True) if compiled else function


def _distribution_sums(
    log_p: Tensor, with_entropy: bool, with_squares: bool, *, in_place: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Entropies and sums of squared probabilities [chunk] of log_p [chunk, V], whose memory it may take."""
    p = log_p.exp()
    entropy = -(log_p.mul_(p) if in_place else log_p * p).sum(-1) if with_entropy else None
    return entropy, p.mul_(p).sum(-1) if with_squares else None


def _grad_logits(
    log_p: Tensor, labels: Tensor, grad_l: Tensor | None, grad_h: Tensor | None, entropy: Tensor | None
) -> Tensor:
    """dLoss/dz [chunk, V] from dLoss/dl and dLoss/dH."""
    p = log_p.exp()
    if grad_h is not None and entropy is not None:
        # -gH p (log p + H) - gl p, in the buffer of log p
        factor = log_p.add_(entropy.unsqueeze(1)).mul_(-grad_h.unsqueeze(1))
        if grad_l is not None:
            factor.sub_(grad_l.unsqueeze(1))
        grad = p.mul_(factor)
    elif grad_l is not None:
        grad = p.mul_(-grad_l.unsqueeze(1))
    else:
        return p.zero_()
    if grad_l is not None:
        grad.scatter_add_(1, labels.unsqueeze(1), grad_l.unsqueeze(1))
    return grad


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
    chunk: int | None = None,
    fused: bool = False,
    softcap: float | None = None,
    recompute: bool = True,
    compiled: bool = False,
) -> TokenStats:
    """log softmax(hidden W^T / T) at the labels, and what else is asked of that distribution.

    Args:
        hidden: [N, h] hidden states in the compute dtype.
        weight: [V, h] output embedding.
        labels: int64 [N] token ids.
        bias: [V] or None.
        temperature: T > 0, one number or fp32 [N].
        with_entropy: also return entropies; without it their arithmetic is skipped.
        with_sum_pi_squared: the same for the sums of squared probabilities.
        chunk: rows of logits at a time; None: by memory (`chunk_rows`).
        fused: let flash-attn's kernel make the log-probs where they are on a GPU, the package is there and nothing else
            is asked for (see `cross_entropy_kernel`).
        softcap: bound of the logits (`final_logit_softcapping`), applied before the temperature; in fp32.
        recompute: compute logits again in the backward; False: keep the log-softmax of all rows until then, which saves
            a matrix product and costs fp32 [N, V].
        compiled: let torch.compile fuse what is done to the log-softmax.

    Returns:
        Log-probs and entropies are differentiable in hidden, weight and bias.
    """
    inv_temperature: Tensor | None = None
    if isinstance(temperature, Tensor):
        inv_temperature = temperature.to(torch.float32).reciprocal()
    elif temperature != 1.0:
        inv_temperature = torch.full((hidden.shape[0],), 1.0 / temperature, device=hidden.device)
    rows = chunk_rows(weight.shape[0], hidden.device) if chunk is None else chunk
    only_log_probs = not (with_entropy or with_sum_pi_squared)
    kernel = flash_cross_entropy() if fused and hidden.is_cuda and only_log_probs else None
    return TokenStats(
        *_LinearLogProb.apply(
            hidden.to(weight.dtype),
            weight,
            bias,
            labels,
            inv_temperature,
            with_entropy,
            with_sum_pi_squared,
            rows,
            kernel,
            softcap,
            # Inside of the function the grad mode is off, whatever it is here.
            not recompute and torch.is_grad_enabled(),
            compiled,
        )
    )
