"""In which type a tensor travels: decided in one place, before any backend sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from rlflow.utils.errors import ConfigError

_TYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}


@dataclass(frozen=True)
class WireTypes:
    """Floating-point tensors become `dtype`, those whose names match a pattern of `keep_fp32` float32; others stay.

    The checksum covers the bytes that travel, so that a server must hold the tensors in these types (or in wider
    ones, from which they come back exactly).
    """

    dtype: torch.dtype
    keep_fp32: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, rollout_config: Any) -> WireTypes:
        """From `rollout.dtype` and `rollout.checkpoint_engine.keep_fp32` (patterns as of a shell: `*.router.weight`).

        Raises:
            ConfigError: a type that is none.
        """
        name = str(rollout_config.dtype)
        if name not in _TYPES:
            raise ConfigError(f"rollout.dtype={name} is no type that weights can travel in. Try bfloat16 or float32")
        patterns = rollout_config.checkpoint_engine.get("keep_fp32", None) or ()
        return cls(_TYPES[name], tuple(str(pattern) for pattern in patterns))

    def of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The type on the wire of the tensor `name` that is stored as `dtype`."""
        if not dtype.is_floating_point:
            return dtype
        return torch.float32 if self.keeps(name) else self.dtype

    def keeps(self, name: str) -> bool:
        """Whether the tensor stays in fp32."""
        return any(fnmatchcase(name, pattern) for pattern in self.keep_fp32)

    def cast(self, params: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors in their types on the wire, one after the other."""
        for name, tensor in params:
            yield name, tensor.detach().to(self.of(name, tensor.dtype))
