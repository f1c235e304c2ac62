"""Statistics and dictionaries of tensors over the ranks of a process group.

All ranks of the group must call a function marked *Collective*; the others are local.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.utils.torch_functional.masked import masked_sum


def distributed_masked_mean(local_tensor: Tensor, local_mask: Tensor) -> Tensor:
    """Mean of the values under the mask over all ranks of the default group; NaN when no rank has one. *Collective.*"""
    sums = torch.stack([masked_sum(local_tensor, local_mask), local_mask.sum().to(local_tensor.dtype)])
    dist.all_reduce(sums, op=dist.ReduceOp.SUM)
    return sums[0] / sums[1]


def distributed_mean_max_min_std(
    local_tensor: Tensor, compute_max: bool = True, compute_min: bool = True, compute_std: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(mean, max, min, sample standard deviation) of the values of all ranks of the default group. *Collective.*

    What is switched off is None. The variance is centred, so that large values with a small spread keep it.
    """
    sums = torch.stack([local_tensor.sum(), local_tensor.new_tensor(local_tensor.numel())])
    dist.all_reduce(sums, op=dist.ReduceOp.SUM)
    total, count = sums
    mean = total / count
    highest = lowest = deviation = None
    if compute_max:
        highest = local_tensor.max() if local_tensor.numel() else local_tensor.new_tensor(float("-inf"))
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    if compute_min:
        lowest = local_tensor.min() if local_tensor.numel() else local_tensor.new_tensor(float("inf"))
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    if compute_std:
        squares = (local_tensor - mean).square().sum()
        dist.all_reduce(squares, op=dist.ReduceOp.SUM)
        deviation = torch.sqrt(squares / (count - 1))
    return mean, highest, lowest, deviation


def allgather_dict_tensors(
    tensors: dict[str, Tensor], size: int, group: dist.ProcessGroup | None, dim: int = 0
) -> dict[str, Tensor]:
    """Each tensor of the dict, joined over the `size` ranks of the group along `dim` (equal shapes). *Collective.*"""
    gathered = {}
    for name in sorted(tensors):
        parts = [torch.empty_like(tensors[name]) for _ in range(size)]
        dist.all_gather(parts, tensors[name].contiguous(), group=group)
        gathered[name] = torch.cat(parts, dim=dim)
    return gathered


def allgather_dict_into_dict(data: dict[str, Any], group: dist.ProcessGroup | None = None) -> dict[str, list[Any]]:
    """Plain values by name -> lists with one value a rank; every rank has the same names. *Collective.*"""
    parts: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(parts, data, group=group)
    return {name: [part[name] for part in parts] for name in data}


def broadcast_dict_tensor(tensors: dict[str, Tensor], src: int, group: dist.ProcessGroup | None) -> None:
    """Overwrite the tensors in place by those of global rank `src` (equal names and shapes). *Collective.*"""
    for name in sorted(tensors):
        dist.broadcast(tensors[name], src=src, group=group)


def split_dict_tensor_into_batches(tensors: Any, batch_size: int) -> list[Any]:
    """A TensorDict cut into equal batches of `batch_size` rows.

    Raises:
        ValueError: `batch_size` does not divide the rows.
    """
    rows = tensors.batch_size[0]
    if rows % batch_size:
        raise ValueError(f"{rows} rows cannot be cut into batches of {batch_size}; choose a divisor of {rows}")
    return list(tensors.split(batch_size))


def compute_grad_norm(model: torch.nn.Module) -> float:
    """SQUARED norm of the local gradients of a module (add it up over the ranks that share the parameters)."""
    return sum(float(p.grad.detach().float().square().sum()) for p in model.parameters() if p.grad is not None)
