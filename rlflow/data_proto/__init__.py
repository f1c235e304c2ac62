"""`DataProto`: a batch of tensors, objects per row and settings, as users of the older surface write it.

    DataProto
        batch              TensorDict or None; tensors [N, ...], dense or jagged
        non_tensor_batch   name -> numpy array [N, ...], mostly of dtype object: one Python object per row
        meta_info          name -> one value for the whole batch

Invariants
    - Row i of every tensor and array belongs to one sample; every function moves rows as a whole.
    - A carrier in the sense of `rlflow.protocol`: what a worker group can do with a TensorDict it can do with this.
    - The caller's objects stay as they are, but for the methods that are documented to work in place.
    - Between processes and to files tensors go as their bytes, objects as msgpack; see `wire`.

`rlflow.protocol` and `rlflow` offer these names too, and load this package only when one is asked for.
"""

from rlflow.data_proto.future import BatchData, DataProtoFuture
from rlflow.data_proto.padding import pad_dataproto_to_divisor, unpad_dataproto
from rlflow.data_proto.proto import DataProto, DataProtoItem
from rlflow.data_proto.reshape import all_gather_data_proto, collate_fn, fold_batch_dim, unfold_batch_dim
from rlflow.data_proto.rules import DataProtoError, object_array
from rlflow.data_proto.settings import DataProtoConfig
from rlflow.data_proto.union import list_of_dict_to_dict_of_list, union_numpy_dict, union_tensor_dict

__all__ = [
    "BatchData",
    "DataProto",
    "DataProtoConfig",
    "DataProtoError",
    "DataProtoFuture",
    "DataProtoItem",
    "all_gather_data_proto",
    "collate_fn",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "object_array",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]
