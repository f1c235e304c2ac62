"""Batches of other shapes: rows folded into groups, items collated, ranks gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict

from rlflow.data_proto.proto import DataProto, DataProtoItem
from rlflow.data_proto.rules import DataProtoError, make_batch, object_array
from rlflow.utils import tensordict_utils as tu


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Rows into groups: [N, ...] -> [new_batch_size, N / new_batch_size, ...], in order.

    Raises:
        DataProtoError: the rows do not divide, or a tensor is jagged.
    """
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise DataProtoError(f"{len(data)} rows cannot be folded into {new_batch_size} groups of equal size")
    group = len(data) // new_batch_size
    return _reshaped(data, lambda shape: (new_batch_size, group, *shape[1:]), "folded")


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """The first `batch_dims` dimensions become one: the inverse of `fold_batch_dim`.

    Raises:
        DataProtoError: a tensor or array has fewer dimensions, or they differ in length.
    """
    values = {**(dict(data.batch.items()) if data.batch is not None else {}), **data.non_tensor_batch}
    leading = {name: tuple(value.shape[:batch_dims]) for name, value in values.items()}
    if len(set(leading.values())) > 1 or any(len(shape) < batch_dims for shape in leading.values()):
        raise DataProtoError(f"{batch_dims} dimensions cannot become one, they differ or are missing: {leading}")
    return _reshaped(data, lambda shape: (-1, *shape[batch_dims:]), "unfolded")


def _reshaped(data: DataProto, shape_of: Any, verb: str) -> DataProto:
    tensors: dict[str, Any] = dict(data.batch.items()) if data.batch is not None else {}
    jagged = sorted(name for name, value in tensors.items() if tu.is_nested(value))
    if jagged:
        raise DataProtoError(f"jagged tensors cannot be {verb}: {', '.join(jagged)}; see nested_to_padded")
    return type(data)(
        make_batch({name: value.reshape(shape_of(value.shape)) for name, value in tensors.items()}),
        {name: array.reshape(shape_of(array.shape)) for name, array in data.non_tensor_batch.items()},
        data.meta_info,
    )


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Items to a batch, without `meta_info`. Tensors that differ in length become jagged.

    Raises:
        DataProtoError: no items.
        ContractError: an item lacks a name that another has.
    """
    if not x:
        raise DataProtoError("no items to make a batch of")
    batch: TensorDict | None = None
    if x[0].batch is not None:
        batch = tu.list_of_dict_to_tensordict([dict(item.batch.items()) for item in x if item.batch is not None])
    names = {name for item in x for name in item.non_tensor_batch}
    for i, item in enumerate(x):
        if missing := sorted(names - set(item.non_tensor_batch)):
            raise DataProtoError(f"item {i} lacks {', '.join(missing)}, which others have")
    order = [name for name in x[0].non_tensor_batch]
    return DataProto(batch, {name: object_array([item.non_tensor_batch[name] for item in x]) for name in order})


def all_gather_data_proto(data: DataProto, process_group: Any) -> None:
    """Replace the rows of `data`, in place, by those of all ranks of a process group, in rank order."""
    import torch.distributed as dist

    parts: list[Any] = [None] * dist.get_world_size(process_group)
    device = None if data.batch is None else data.batch.device
    dist.all_gather_object(parts, type(data)(data.batch, data.non_tensor_batch), group=process_group)
    gathered = type(data).concat(parts)
    data.batch, data.non_tensor_batch = gathered.batch, gathered.non_tensor_batch
    if device is not None:
        data.to(device)
