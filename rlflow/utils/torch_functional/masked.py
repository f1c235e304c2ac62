"""Sums, means and whitening under a mask.

Invariants
    - A value outside the mask, NaN and inf included, never reaches a statistic.
    - Half precision is summed, and returned, in fp32: 1e-8 is 0 in fp16, and counts over 65504 are inf.
    - Equal values have no deviations to speak of: dividing by sqrt(0 + 1e-8) multiplies what is left of them by 1e4.
"""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Half precision as fp32, anything else as it is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Sum where the mask is set; NaN or inf outside the mask does not leak in."""
    values, mask = at_least_fp32(values), at_least_fp32(mask)
    masked = values.masked_fill(~mask.bool(), 0) * mask
    return masked.sum() if axis is None else masked.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean where the mask is set (denominator + 1e-8: an empty mask gives 0)."""
    mask = at_least_fp32(mask)
    count = mask.sum() if axis is None else mask.sum(dim=axis)
    return masked_sum(values, mask, axis) / (count + 1e-8)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance where the mask is set: mean of (x - mean)^2, times n / (n - 1) when `unbiased`.

    Raises:
        ValueError: `unbiased` with no or one value under the mask, where n / (n - 1) has no meaning.
    """
    values, mask = at_least_fp32(values), at_least_fp32(mask)
    count = mask.sum()
    if unbiased and count <= 1:
        raise ValueError(
            f"the sample variance needs two values under the mask, there are {int(count)}; use unbiased=False"
        )
    variance = masked_mean(_deviations(values, mask)[0].square(), mask)
    return variance * count / (count - 1) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Values shifted and scaled to mean 0 and sample variance 1 (n - 1) where the mask is set.

    (x - mean) / sqrt(var + 1e-8), plus the mean again with `shift_mean=False`. Everything is shifted and scaled, also
    outside the mask. A single valid value becomes 0: training goes on where `masked_var` has to refuse.
    """
    values, mask = at_least_fp32(values), at_least_fp32(mask)
    deviations, mean = _deviations(values, mask)
    count = mask.sum()
    variance = masked_mean(deviations.square(), mask) * count / (count - 1).clamp(min=1)
    whitened = deviations * torch.rsqrt(variance + 1e-8)
    return whitened if shift_mean else whitened + mean


def _deviations(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Values minus their mean where the mask is set, and that mean.

    The mean of many fp32 values is off by some 1e-7 of it. Subtracting the mean of the deviations too leaves 1e-7 of
    that error, without a copy in fp64.
    """
    mean = masked_mean(values, mask)
    deviations = values - mean
    error = masked_mean(deviations, mask)
    return deviations - error, mean + error


def clip_by_value(x: Tensor, tensor_min: Tensor | float, tensor_max: Tensor | float) -> Tensor:
    """max(min(x, tensor_max), tensor_min), with tensor bounds too; where they cross, the lower bound wins."""
    return torch.maximum(
        torch.minimum(x, torch.as_tensor(tensor_max, dtype=x.dtype, device=x.device)),
        torch.as_tensor(tensor_min, dtype=x.dtype, device=x.device),
    )
