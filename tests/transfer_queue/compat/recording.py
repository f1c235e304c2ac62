"""Results of calls as plain JSON, so that two packages can be compared that live in two environments.

Imports torch, tensordict and numpy only. Row numbers are recorded as their order of appearance in a case, because
packages count differently; which row is which, and whether a number comes back, still shows.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase


class Recorder:
    """Runs the steps of one case and keeps what they gave."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        self._numbers: dict[int, int] = {}

    def __call__(self, step: str, call: Callable[[], Any]) -> Any:
        """Record what `call()` returns or raises, under the name `step`; returns the value, None after an error."""
        assert step not in self.results, f"the step {step!r} occurs twice"
        try:
            value = call()
            if inspect.isawaitable(value):
                value = asyncio.run(_await(value))
        except Exception as error:  # noqa: BLE001 - which error it is, is the result
            self.results[step] = {"raises": [kind.__name__ for kind in type(error).__mro__ if kind is not object]}
            return None
        self.results[step] = self.plain(value)
        return value

    def rows(self, indexes: Any) -> list[int]:
        """Row numbers as their order of appearance."""
        return [self._numbers.setdefault(int(index), len(self._numbers)) for index in indexes]

    def plain(self, value: Any) -> Any:
        """The value as JSON, with what a user can tell apart kept apart."""
        name = type(value).__name__
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return round(value, 6)
        if isinstance(value, torch.Tensor):
            return _tensor(value)
        if isinstance(value, NonTensorStack):
            return {"objects": self.plain(value.tolist())}
        if isinstance(value, NonTensorData):
            return {"object": self.plain(value.data)}
        if isinstance(value, TensorDictBase):
            return {"batch_size": list(value.batch_size), "fields": {k: self.plain(value.get(k)) for k in _keys(value)}}
        if isinstance(value, (np.ndarray, np.generic)):
            return {"array": value.tolist(), "dtype": str(value.dtype)}
        if isinstance(value, (torch.dtype, torch.Size)):
            return str(value)
        if name == "KVBatchMeta":
            parts = ("keys", "tags", "partition_id", "fields", "extra_info")
            return {"KVBatchMeta": {part: self.plain(getattr(value, part)) for part in parts}}
        if name == "BatchMeta":
            return {"BatchMeta": self._batch_meta(value)}
        if isinstance(value, Mapping):
            return {str(key): self.plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.plain(item) for item in value]
        return {"instance of": name}

    def _batch_meta(self, meta: Any) -> dict[str, Any]:
        return {
            "rows": self.rows(meta.global_indexes),
            "partition_ids": list(meta.partition_ids),
            "field_names": list(meta.field_names),
            "dtypes": {name: self.plain(list(meta.get_dtypes(name))) for name in meta.field_names},
            "shapes": {name: [_shape(s) for s in meta.get_shapes(name)] for name in meta.field_names},
            "production_status": np.asarray(meta.production_status).tolist(),
            "size": meta.size,
            "is_ready": bool(meta.is_ready),
            "custom_meta": self.plain(meta.get_all_custom_meta()),
            "extra_info": self.plain(meta.get_all_extra_info()),
        }


async def _await(value: Any) -> Any:
    return await value


def _keys(data: TensorDictBase) -> list[str]:
    return sorted(str(key) for key in data.keys())  # noqa: SIM118 - iterating a TensorDict gives its rows


def _shape(shape: Any) -> list[int] | None:
    return None if shape is None else [int(n) for n in shape]


def _tensor(value: torch.Tensor) -> dict[str, Any]:
    if value.is_nested:
        layout = "jagged" if value.layout == torch.jagged else "strided nested"
        return {layout: [row.tolist() for row in value.unbind()], "dtype": str(value.dtype)}
    return {"tensor": value.tolist(), "dtype": str(value.dtype)}
