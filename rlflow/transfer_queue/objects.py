"""Plain Python objects as msgpack: `str, int, float, bool, None, bytes`, lists, tuples and dicts of these, with numpy
arrays, numpy scalars and tensors inside. Types survive: a tuple comes back as a tuple, np.float64 as np.float64.

Anything else is refused. Nothing is ever pickled, so reading a cell cannot run code.
"""

from __future__ import annotations

import sys
from typing import Any

import msgpack
import numpy as np

from rlflow.transfer_queue.errors import QueueTypeError

_ARRAY, _SCALAR, _TENSOR, _TUPLE, _BIG_INT = range(1, 6)


def pack(value: Any) -> bytes:
    """One object as bytes; `QueueTypeError` for a type that has no plain form."""
    try:
        # Lone surrogates occur in sampled text; strict_types keeps tuples and subclasses from becoming their base.
        return msgpack.packb(value, default=_encode, strict_types=True, unicode_errors="surrogatepass")
    except (ValueError, OverflowError, RecursionError) as error:
        raise QueueTypeError(f"the object cannot be stored ({error}); nest it less deeply") from error


def pack_plain(value: Any) -> bytes:
    """`pack` without arrays and tensors, for what the controller keeps and compares."""
    try:
        return msgpack.packb(value, default=_encode_plain, strict_types=True, unicode_errors="surrogatepass")
    except (ValueError, OverflowError, RecursionError) as error:
        raise QueueTypeError(f"the object cannot be stored ({error}); nest it less deeply") from error


def unpack(data: bytes | memoryview) -> Any:
    """Inverse of `pack`."""
    return msgpack.unpackb(data, ext_hook=_decode, strict_map_key=False, unicode_errors="surrogatepass")


def has_plain_bytes(tensor: Any) -> bool:
    """Whether the bytes of a tensor (or of its rows, if nested) are its values: not so for sparse and quantized."""
    return str(tensor.layout) in ("torch.strided", "torch.jagged") and not tensor.is_quantized and not tensor.is_meta


def _encode(value: Any) -> msgpack.ExtType:
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, pack(list(value)))
    if type(value) is int:
        return msgpack.ExtType(_BIG_INT, str(value).encode())
    if isinstance(value, np.generic):
        return msgpack.ExtType(_SCALAR, _pack_array(np.asarray(value)))
    if type(value) is np.ndarray:
        return msgpack.ExtType(_ARRAY, _pack_array(value))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and not value.is_nested and has_plain_bytes(value):
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        name = str(flat.dtype).removeprefix("torch.")
        return msgpack.ExtType(_TENSOR, pack([name, list(value.shape), flat.view(torch.uint8).numpy().tobytes()]))
    kind = type(value)
    raise QueueTypeError(
        f"a value of type {kind.__module__}.{kind.__qualname__} cannot be stored. Store str, int, float, bool, None, "
        "lists and dicts of these, numpy arrays or tensors"
    )


def _encode_plain(value: Any) -> msgpack.ExtType:
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, pack_plain(list(value)))
    if type(value) is int or isinstance(value, np.generic):
        return _encode(value)
    kind = type(value)
    raise QueueTypeError(
        f"a {kind.__module__}.{kind.__qualname__} is no plain value. Use str, int, float, bool, None, bytes, or lists, "
        "tuples and dicts of these"
    )


def _pack_array(array: np.ndarray) -> bytes:
    if array.dtype.hasobject or array.dtype.fields is not None:
        raise QueueTypeError(
            f"a numpy array of dtype {array.dtype} cannot be stored; give a list (array.tolist()) or a numeric array"
        )
    return pack([array.dtype.str, list(array.shape), array.tobytes()])


def _decode(code: int, data: bytes) -> Any:
    if code == _TUPLE:
        return tuple(unpack(data))
    if code == _BIG_INT:
        return int(data)
    kind, shape, raw = unpack(data)
    if code == _TENSOR:
        import torch

        dtype = getattr(torch, kind)
        if not raw:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)
    array = np.frombuffer(bytearray(raw), dtype=np.dtype(kind)).reshape(shape)
    return array[()] if code == _SCALAR else array
