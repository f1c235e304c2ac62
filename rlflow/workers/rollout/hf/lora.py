"""A LoRA adapter beside the served weights: y = W x + s B A x, in the layers that it names.

Invariants
    - The base weights stay what they are; an adapter arrives and is replaced on its own.
    - A layer computes with the adapter from `bind` on, that is when all of its parts have arrived.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlflow.utils.errors import WeightSyncError

# Names as PEFT writes them: base_model.model.<module>.lora_A.weight
_NAME = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight$")


class ServedAdapter:
    """The adapter of one served model.

    Args:
        module: a transformers model.
        config: PEFT's, as a dict; its entry `scaling` (module -> s) counts before `lora_alpha / r`.
    """

    def __init__(self, module: nn.Module, config: dict[str, Any]) -> None:
        self._module, self._config = module, config
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._hooks: list[Any] = []

    def target(self, name: str, tensor: Tensor) -> Tensor:
        """Where the part of that name belongs.

        Raises:
            WeightSyncError: no part of an adapter, or one that fits no linear layer of the served model.
        """
        found = _NAME.match(name)
        if found is None:
            raise WeightSyncError(f"The trainer sent {name!r}, which is no part of a LoRA adapter.", tensors=(name,))
        path, side = found["module"], found["side"]
        try:
            layer = self._module.get_submodule(path)
        except AttributeError:
            layer = None
        if not isinstance(layer, nn.Linear):
            raise WeightSyncError(
                f"The trainer sent {name!r}; the served {type(self._module).__name__} has no linear layer {path!r}. "
                "Actor and rollout must be built from the same config (actor_rollout_ref.model).",
                tensors=(name,),
            )
        wide = tensor.shape[1] == layer.in_features if side == "A" else tensor.shape[0] == layer.out_features
        if tensor.dim() != 2 or not wide:
            raise WeightSyncError(
                f"The trainer sent {name!r} with shape {tuple(tensor.shape)}, for a layer of {layer.in_features} to "
                f"{layer.out_features} features.",
                tensors=(name,),
            )
        parts = self._parts.setdefault(path, {})
        if side not in parts or parts[side].shape != tensor.shape:
            parts[side] = torch.empty(tensor.shape, dtype=layer.weight.dtype, device=layer.weight.device)
        return parts[side]

    def get(self, name: str) -> Tensor:
        """The part of that name as it is held."""
        found = _NAME.match(name)
        assert found is not None
        return self._parts[found["module"]][found["side"]]

    def bind(self) -> tuple[str, ...]:
        """Let the layers compute with it; their names.

        Raises:
            WeightSyncError: a layer got one matrix of the two, or two of different rank.
        """
        self.unbind()
        for path, parts in self._parts.items():
            if len(parts) != 2 or parts["A"].shape[0] != parts["B"].shape[1]:
                shapes = {side: tuple(part.shape) for side, part in parts.items()}
                raise WeightSyncError(f"The adapter of {path} is incomplete: {shapes}.", tensors=(path,))
        for path, parts in self._parts.items():
            layer = self._module.get_submodule(path)
            self._hooks.append(
                layer.register_forward_hook(_Adapted(parts["A"], parts["B"], self._scaling(path, parts)))
            )
        return tuple(sorted(self._parts))

    def unbind(self) -> None:
        """Compute with the base weights only."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _scaling(self, path: str, parts: dict[str, Tensor]) -> float:
        given = (self._config.get("scaling") or {}).get(path)
        if given is not None:
            return float(given)
        rank = parts["A"].shape[0]
        return float(self._config["lora_alpha"]) / (rank**0.5 if self._config.get("use_rslora") else rank)


class _Adapted:
    """Forward hook of a layer."""

    def __init__(self, a: Tensor, b: Tensor, scaling: float) -> None:
        self._a, self._b, self._scaling = a, b, scaling

    def __call__(self, _layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return torch.add(output, F.linear(F.linear(inputs[0], self._a), self._b), alpha=self._scaling)
