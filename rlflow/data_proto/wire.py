"""A `DataProto` as bytes, for other processes and for files.

    header     msgpack: format and version, number of rows, one entry per value (name, kind, dtype, shape)
    buffers    the bytes of tensors and numeric arrays as they lie in memory; of objects, their msgpack

Between processes (`pickle`, which is what Ray uses) the buffers travel out of band, so that no tensor is pickled.
Objects that msgpack does not know (images, users' classes) are left to the pickle of the cluster. In a file there is no
pickle: such objects are refused when it is written, and reading one cannot run code.

Tensors arrive in the memory of the CPU, wherever they were.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from rlflow.data_proto.rules import DataProtoError, object_array
from rlflow.transfer_queue.errors import QueueTypeError
from rlflow.transfer_queue.objects import has_plain_bytes, pack, unpack
from rlflow.utils import tensordict_utils as tu

if TYPE_CHECKING:
    from rlflow.data_proto.proto import DataProto

MAGIC = b"DataProto\x00"
VERSION = 1
Buffer = Any  # np.ndarray, bytes or memoryview


@dataclass
class Packed:
    """A batch taken apart.

    Attributes:
        header: what says how to put it together again; plain values only.
        buffers: uint8 arrays and bytes, in the order in which the header's entries use them.
        opaque: objects that msgpack does not know, in the order of use.
    """

    header: dict[str, Any]
    buffers: list[Buffer] = field(default_factory=list)
    opaque: list[Any] = field(default_factory=list)


# ---- taking apart ------------------------------------------------------------------------------------------------


def pack_data(data: DataProto) -> Packed:
    """Take a batch apart; its memory is not copied where it is gapless and on the CPU."""
    batch = data.batch
    packed = Packed({"format": MAGIC.decode(), "version": VERSION, "rows": None if batch is None else len(data)})
    packed.header["batch"] = [_value_entry(packed, k, v) for k, v in (batch.items() if batch is not None else ())]
    packed.header["arrays"] = [_array_entry(packed, k, v) for k, v in data.non_tensor_batch.items()]
    packed.header["meta"] = [_object_entry(packed, k, "object", v) for k, v in data.meta_info.items()]
    return packed


def _value_entry(packed: Packed, name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return _tensor_entry(packed, name, value)
    if isinstance(value, NonTensorStack):
        return _object_entry(packed, name, "stack", tu.unwrap_non_tensor_data(value))
    if isinstance(value, NonTensorData):
        return _object_entry(packed, name, "whole", value.data)
    raise DataProtoError(f"batch[{name!r}] is a {type(value).__name__}, which cannot be sent; a batch holds tensors")


def _tensor_entry(packed: Packed, name: str, value: Tensor) -> dict[str, Any]:
    if not has_plain_bytes(value):
        raise DataProtoError(
            f"batch[{name!r}] has layout {value.layout} and dtype {value.dtype}, whose values cannot be sent as they "
            "are; give a dense tensor with data (to_dense(), dequantize()) or a jagged one"
        )
    ragged = None
    if value.is_nested:
        value, ragged = tu.compact(value.detach()), tu.ragged_dim(value)
        packed.buffers.append(_bytes_of(tu.nested_lengths(value)))
        value = tu.nested_values(value)
    packed.buffers.append(_bytes_of(value))
    dtype = str(value.dtype).removeprefix("torch.")
    return {"name": name, "kind": "tensor", "dtype": dtype, "shape": list(value.shape), "ragged": ragged}


def _bytes_of(tensor: Tensor) -> np.ndarray:
    # A conjugated or negated view only notes that its bytes are to be read otherwise.
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def _array_entry(packed: Packed, name: str, array: np.ndarray) -> dict[str, Any]:
    if array.dtype.hasobject or array.dtype.fields is not None:
        return _object_entry(packed, name, "objects", array.reshape(-1).tolist(), list(array.shape), whole=array)
    packed.buffers.append(np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8))
    return {"name": name, "kind": "array", "dtype": array.dtype.str, "shape": list(array.shape)}


def _object_entry(
    packed: Packed, name: str, kind: str, value: Any, shape: list[int] | None = None, whole: Any = None
) -> dict[str, Any]:
    try:
        packed.buffers.append(pack(value))
    except QueueTypeError as error:
        packed.opaque.append(value if whole is None else whole)
        return {"name": name, "kind": f"opaque {kind}", "why": str(error)}
    return {"name": name, "kind": kind, "shape": shape}


# ---- putting together --------------------------------------------------------------------------------------------


def unpack_data(packed: Packed) -> tuple[TensorDict | None, dict[str, np.ndarray], dict[str, Any]]:
    """(batch, non_tensor_batch, meta_info); all memory is the result's own.

    Raises:
        DataProtoError: another format, or one of a later version.
    """
    header = packed.header
    if header.get("format") != MAGIC.decode() or header.get("version") != VERSION:
        raise DataProtoError(
            f"a DataProto of format {header.get('format')!r}, version {header.get('version')!r} cannot be read; this "
            f"is version {VERSION}. Write and read it with the same version of rlflow."
        )
    buffers, opaque = iter(packed.buffers), iter(packed.opaque)
    rows = header["rows"]
    batch = None if rows is None else TensorDict({}, batch_size=[rows])
    for entry in header["batch"]:
        value = _read(entry, buffers, opaque)
        kind = entry["kind"].removeprefix("opaque ")
        if kind == "stack":
            value = tu.make_stack(value)
        elif kind == "whole":
            value = NonTensorData(value, batch_size=[rows])
        assert batch is not None
        batch.set(entry["name"], value)
    arrays = {entry["name"]: _read(entry, buffers, opaque) for entry in header["arrays"]}
    return batch, arrays, {entry["name"]: _read(entry, buffers, opaque) for entry in header["meta"]}


def _read(entry: Mapping[str, Any], buffers: Any, opaque: Any) -> Any:
    kind = entry["kind"]
    if kind.startswith("opaque "):
        return next(opaque)
    if kind == "tensor":
        lengths = None if entry["ragged"] is None else _tensor(next(buffers), "int64", [-1])
        values = _tensor(next(buffers), entry["dtype"], entry["shape"])
        return values if lengths is None else tu.nested_from_values(values, lengths, entry["ragged"])
    if kind == "array":
        return np.frombuffer(bytearray(next(buffers)), np.dtype(entry["dtype"])).reshape(entry["shape"])
    value = unpack(bytes(next(buffers)))
    return object_array(value).reshape(entry["shape"]) if kind == "objects" else value


def _tensor(buffer: Buffer, dtype: str, shape: Sequence[int]) -> Tensor:
    flat = np.frombuffer(buffer, np.uint8)
    if not len(flat):
        return torch.empty([max(size, 0) for size in shape], dtype=getattr(torch, dtype))
    # Read-only bytes are somebody else's (a message in Ray's memory); others may begin where no number may.
    return torch.from_numpy(flat.copy()).view(getattr(torch, dtype)).reshape(list(shape))


# ---- processes ---------------------------------------------------------------------------------------------------


def reduce(data: DataProto, protocol: int) -> tuple[Any, ...]:
    """What `__reduce_ex__` answers; from protocol 5 on the buffers are out of band."""
    packed = pack_data(data)
    wrap = pickle.PickleBuffer if protocol >= 5 else bytes
    buffers = [wrap(buffer) for buffer in packed.buffers]
    return _rebuild, (type(data), msgpack.packb(packed.header), buffers, packed.opaque)


def _rebuild(cls: type[DataProto], header: bytes, buffers: list[Buffer], opaque: list[Any]) -> DataProto:
    return cls(*unpack_data(Packed(msgpack.unpackb(header), buffers, opaque)))


# ---- files -------------------------------------------------------------------------------------------------------


def save(data: DataProto, path: Path) -> None:
    """Write a batch; the file appears whole or not at all.

    Raises:
        DataProtoError: it holds objects that have no plain form; the message names them.
    """
    packed = pack_data(data)
    entries = [(where, entry) for where in ("batch", "arrays", "meta") for entry in packed.header[where]]
    opaque = [f"{where}[{entry['name']!r}]: {entry['why']}" for where, entry in entries if "why" in entry]
    if opaque:
        raise DataProtoError(f"{path} was not written, a file holds plain values only. " + "; ".join(opaque))
    header = msgpack.packb({**packed.header, "sizes": [memoryview(buffer).nbytes for buffer in packed.buffers]})
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            file.write(MAGIC + len(header).to_bytes(8, "little") + header)
            for buffer in packed.buffers:
                file.write(buffer)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def load(path: Path) -> tuple[TensorDict | None, dict[str, np.ndarray], dict[str, Any]]:
    """What `save` wrote, as `unpack_data` gives it.

    Raises:
        DataProtoError: the file is something else (a pickle of another library), or is cut off.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise DataProtoError(
                f"{path} is no DataProto file. Pickles are not read, because reading one can run code: load it where "
                "it was written, and save its tensors and arrays anew"
            )
        try:
            header = msgpack.unpackb(file.read(int.from_bytes(file.read(8), "little")))
            sizes = header.pop("sizes")
        except (ValueError, KeyError, AttributeError) as error:
            raise DataProtoError(f"{path} is damaged: its header cannot be read ({error})") from error
        buffers = [file.read(size) for size in sizes]
    if [len(buffer) for buffer in buffers] != sizes:
        raise DataProtoError(f"{path} is cut off: it lacks {sum(sizes) - sum(map(len, buffers))} bytes")
    return unpack_data(Packed(header, buffers))
