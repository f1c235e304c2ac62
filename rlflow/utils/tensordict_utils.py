"""Batches: building, reading, cutting and joining `TensorDict`s. Imported as `tu`.

A batch holds four kinds of values:

    dense tensor     [N, ...]
    jagged tensor    [N, j, ...]; helpers in `rlflow.utils.nested`, exported here too
    NonTensorStack   one Python object per row
    NonTensorData    one Python object for the whole batch (options, metrics)

Invariants
    - Row i of every batched value belongs to the same trajectory; every function here moves rows as a whole.
    - Nothing is padded, cut off or dropped in silence: sizes that do not fit raise `ContractError`.
    - A batch without a batch dimension (`batch_size == []`) carries `NonTensorData` only, as the metrics of an
      update do.
"""

from __future__ import annotations

from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlflow.utils.nested import (
    check_jagged,
    compact,
    concat_nested_tensors,
    is_nested,
    length_mask,
    nested_from_list,
    nested_from_values,
    nested_index_select,
    nested_lengths,
    nested_like,
    nested_narrow,
    nested_row_sums,
    nested_to_padded,
    nested_values,
    padded_to_nested,
    ragged_dim,
)
from rlflow.utils.tensordict_build import (
    assign_non_tensor,
    assign_non_tensor_data,
    assign_non_tensor_stack,
    assign_non_tensor_whole,
    get,
    get_keys,
    get_non_tensor_data,
    get_tensordict,
    is_batched,
    list_of_dict_to_tensordict,
    make_stack,
    non_tensor_dict,
    pop,
    pop_keys,
    unwrap_non_tensor_data,
)
from rlflow.utils.tensordict_rows import (
    assert_tensordict_eq,
    chunk_tensordict,
    concat_tensordict,
    contiguous,
    index_select_tensor_dict,
    make_iterator,
    maybe_fix_3d_position_ids,
    mini_batch_rows,
    pad_to_divisor,
    row_index,
    slice_tensordict,
    union_tensor_dict,
    unpad,
    values_equal,
)

nested_tensor_from_tensor_list = nested_from_list

__all__ = [
    "NonTensorData",
    "NonTensorStack",
    "TensorDict",
    "assert_tensordict_eq",
    "assign_non_tensor",
    "assign_non_tensor_data",
    "assign_non_tensor_stack",
    "assign_non_tensor_whole",
    "check_jagged",
    "chunk_tensordict",
    "compact",
    "concat_nested_tensors",
    "concat_tensordict",
    "contiguous",
    "get",
    "get_keys",
    "get_non_tensor_data",
    "get_tensordict",
    "index_select_tensor_dict",
    "is_batched",
    "is_nested",
    "length_mask",
    "list_of_dict_to_tensordict",
    "make_iterator",
    "make_stack",
    "maybe_fix_3d_position_ids",
    "mini_batch_rows",
    "nested_from_list",
    "nested_from_values",
    "nested_index_select",
    "nested_lengths",
    "nested_like",
    "nested_narrow",
    "nested_row_sums",
    "nested_tensor_from_tensor_list",
    "nested_to_padded",
    "nested_values",
    "non_tensor_dict",
    "pad_to_divisor",
    "padded_to_nested",
    "pop",
    "pop_keys",
    "ragged_dim",
    "row_index",
    "slice_tensordict",
    "union_tensor_dict",
    "unpad",
    "unwrap_non_tensor_data",
    "values_equal",
]
