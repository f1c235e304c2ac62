"""Padding to a multiple, and taking it off again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlflow.data_proto.rules import DataProtoError

if TYPE_CHECKING:
    from rlflow.data_proto.proto import DataProto


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """(batch, pad): rows added until their number is a multiple of `size_divisor`, taken from the start, in a copy.

    A batch without rows is returned as it is.

    Raises:
        DataProtoError: a divisor below 1.
    """
    if size_divisor < 1:
        raise DataProtoError(f"size_divisor={size_divisor} must be at least 1")
    size = len(data)
    pad = -size % size_divisor
    return (data[[i % size for i in range(size + pad)]], pad) if pad else (data, 0)


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """`data` without its last `pad_size` rows.

    Raises:
        DataProtoError: there are fewer rows.
    """
    if not 0 <= pad_size <= len(data):
        raise DataProtoError(f"cannot take {pad_size} rows of padding off a batch of {len(data)}")
    return data.slice(0, len(data) - pad_size) if pad_size else data
