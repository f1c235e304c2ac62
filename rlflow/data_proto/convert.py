"""Between the three parts of a `DataProto` and one `TensorDict`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tensordict import NonTensorStack, TensorDict

from rlflow.data_proto.rules import DataProtoError, object_array
from rlflow.data_proto.union import refuse_conflicts
from rlflow.utils import tensordict_utils as tu


def parts_of(
    data: TensorDict, meta_info: Mapping[str, Any]
) -> tuple[TensorDict | None, dict[str, np.ndarray], dict[str, Any]]:
    """(batch, non_tensor_batch, meta_info) as `DataProto.from_tensordict` has them."""
    whole = tu.non_tensor_dict(data)
    stacks = {key: value for key, value in data.items() if isinstance(value, NonTensorStack)}
    arrays = {str(key): object_array(tu.unwrap_non_tensor_data(value)) for key, value in stacks.items()}
    names = [str(key) for key in data.keys() if key not in whole and key not in stacks]
    # Rows without any tensor or object still are rows.
    batch = tu.get_keys(data, names) if tu.is_batched(data) and (names or not arrays) else None
    refuse_conflicts("meta_info", whole, meta_info)
    return batch, arrays, {**whole, **meta_info}


def joined(batch: TensorDict | None, arrays: Mapping[str, np.ndarray], meta_info: Mapping[str, Any]) -> TensorDict:
    """One TensorDict as `DataProto.to_tensordict` makes it; without rows when no part has any."""
    tensors = {} if batch is None else dict(batch.items())
    parts: dict[str, Mapping[Any, Any]] = {"batch": tensors, "non_tensor_batch": arrays, "meta_info": meta_info}
    for key in [key for part in parts.values() for key in part]:
        if len(places := [name for name, part in parts.items() if key in part]) > 1:
            raise DataProtoError(f"{key} is in {' and '.join(places)}; a name has one meaning in a TensorDict")
    size = [len(array) for array in arrays.values()][:1] if batch is None else batch.batch_size
    out = TensorDict({}, batch_size=size, device=None if batch is None else batch.device)
    for key, value in tensors.items():
        out.set(key, value)
    for key, array in arrays.items():
        out.set(key, tu.make_stack(array.tolist()))
    return tu.assign_non_tensor_whole(out, meta_info)
