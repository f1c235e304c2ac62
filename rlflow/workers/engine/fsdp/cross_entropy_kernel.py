"""flash-attn's Triton kernel for log-probs from logits on a GPU, beside the torch arithmetic of `log_prob.py`.

*Written for flash-attn >= 2.6, not run yet:* no CUDA device was available when it was written. It is used only where
`actor_rollout_ref.model.use_fused_kernels=true` asks for it. tests/workers/test_log_prob.py compares it with the plain
formula (marker `gpu`); run that first.

The kernel reads a row of logits once and makes its log-sum-exp in fp32, whatever the dtype of the logits; its backward
writes the gradient over them. Nothing here holds more logits than it is given: the caller passes chunks.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

CrossEntropy = Callable[..., tuple[Tensor, Tensor]]


@functools.cache
def flash_cross_entropy() -> CrossEntropy | None:
    """`cross_entropy_loss` of flash-attn; None, noted once, where the package (or Triton) cannot be imported."""
    try:
        module = importlib.import_module("flash_attn.ops.triton.cross_entropy")
    except ImportError as error:
        logger.warning("use_fused_kernels: flash-attn's cross-entropy is not there (%s); torch computes instead", error)
        return None
    return module.cross_entropy_loss


def log_probs(kernel: CrossEntropy, logits: Tensor, labels: Tensor) -> Tensor:
    """log softmax(logits) at the labels, fp32 [n], of logits [n, V] in any float dtype."""
    losses, _ = kernel(logits, labels)
    return losses.neg_()


def grad_logits(kernel: CrossEntropy, logits: Tensor, labels: Tensor, grad: Tensor) -> Tensor:
    """dLoss/dlogits [n, V] from dLoss/dlog-prob fp32 [n]; it takes the memory of `logits`."""
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        losses, _ = kernel(logits, labels, inplace_backward=True)
        (result,) = torch.autograd.grad(losses, logits, -grad)
    return result
