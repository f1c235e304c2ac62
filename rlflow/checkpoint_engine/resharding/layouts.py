"""What each rank holds while training, and wants while generating, as parts of the full tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from rlflow.checkpoint_engine.resharding.boxes import Box, Part, whole
from rlflow.checkpoint_engine.resharding.groups import HybridGroups
from rlflow.checkpoint_engine.resharding.splits import ParamSplit, stage_of

Shapes = Mapping[str, Sequence[int]]
Splits = Mapping[str, ParamSplit]


def held_part(tensor: Tensor) -> Part:
    """What this rank holds of a tensor as the training engine stores it: FSDP's rows, or all of a plain tensor."""
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if 0 in size:
        return ()
    return (Box(tuple(start), tuple(size), (0,) * len(size)),)


def training_parts(plan: HybridGroups, shapes: Shapes, splits: Splits, layers: int, rank: int) -> dict[str, Part]:
    """What a rank of a pipeline x tensor-parallel trainer holds: the slice tau of the weights of its stage."""
    stage, slice_ = plan.train_piece[rank]
    return {
        name: splits[name].part(shape, slice_, plan.t)
        for name, shape in shapes.items()
        if stage_of(name, layers, plan.p) == stage
    }


def generation_parts(plan: HybridGroups, shapes: Shapes, splits: Splits, layers: int, rank: int) -> dict[str, Part]:
    """What the same rank wants while it generates."""
    stage, slot = plan.slot_of(rank)
    return {
        name: splits[name].part(shape, slot, plan.t_g)
        for name, shape in shapes.items()
        if stage_of(name, layers, plan.p_g) == stage
    }


def replica_parts(shapes: Shapes, splits: Splits, rank: int, tensor_parallel: int) -> dict[str, Part]:
    """What a rank wants whose replica is `tensor_parallel` consecutive ranks: slot rank % size, all layers."""
    return {name: splits[name].part(shape, rank % tensor_parallel, tensor_parallel) for name, shape in shapes.items()}


def element_bytes(parts: Mapping[str, Part], itemsize: Any) -> int:
    """Bytes of parts whose values have `itemsize` bytes each."""
    return sum(box.numel for part in parts.values() for box in part) * int(itemsize)
