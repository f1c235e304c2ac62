"""Weights of experts under the names that checkpoints have: one matrix an expert, where transformers packs them all.

...mlp.experts.gate_up_proj [E, 2 I, H]   ->  ...mlp.experts.{e}.gate_proj.weight, ...{e}.up_proj.weight [I, H]
...mlp.experts.down_proj    [E, H, I]     ->  ...mlp.experts.{e}.down_proj.weight [H, I]
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

# Model types whose checkpoints have these names; others keep the names of their parameters.
_PER_EXPERT = ("qwen2_moe", "qwen3_moe")
_PACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def splits_experts(config: Any) -> bool:
    """Whether checkpoints of a model with this text config hold one matrix an expert."""
    return config.model_type in _PER_EXPERT


def expert_parts(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Name -> view of each expert's part of a packed weight; the weight itself under its name where it is none."""
    if not name.endswith(_PACKED) or weight.dim() != 3:
        return {name: weight}
    stem, _, kind = name.rpartition(".")
    if kind == "down_proj":
        return {f"{stem}.{e}.down_proj.weight": part for e, part in enumerate(weight)}
    half = weight.shape[1] // 2
    gates = {f"{stem}.{e}.gate_proj.weight": part[:half] for e, part in enumerate(weight)}
    return gates | {f"{stem}.{e}.up_proj.weight": part[half:] for e, part in enumerate(weight)}
