"""How a model is cut into sharded groups: one per transformer layer, one for the rest.

    reshard_after_forward    true: gathered weights are freed after the forward and gathered again in the backward
                             (ZeRO-3); false: they stay until the backward (ZeRO-2)
    forward_prefetch         the next layer's weights are gathered while this one computes
    offload_policy           shards, gradients and optimizer state live in host memory, the optimizer steps there
    mixed_precision          precision of computation and of the gradients' reduction
    wrap_policy              which layers become groups

Invariant: none of these changes a gradient, but for the rounding of a lower precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from rlflow.utils.errors import ConfigError

if TYPE_CHECKING:
    from rlflow.workers.engine.fsdp.model import PackedModel

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
_PRECISIONS = ("param_dtype", "reduce_dtype", "buffer_dtype")
_WRAP_KEYS = ("disable", "transformer_layer_cls_to_wrap", "min_num_params")


def parse_dtype(name: str | torch.dtype, key: str) -> torch.dtype:
    """The torch dtype of a config value; `ConfigError` names the key."""
    if isinstance(name, torch.dtype):
        return name
    try:
        return DTYPES[str(name).removeprefix("torch.")]
    except KeyError:
        raise ConfigError(f"{key}={name!r} is no dtype; use one of {', '.join(DTYPES)}") from None


def shard(module: PackedModel, engine_config: Any, mesh: DeviceMesh) -> None:
    """Shard the parameters of `module` over `mesh`, layer by layer."""
    options: dict[str, Any] = {"mesh": mesh}
    # A group of one rank gathers nothing: freeing "gathered" weights would only copy them once more in the backward.
    options["reshard_after_forward"] = bool(engine_config.reshard_after_forward) and mesh["fsdp"].size() > 1
    if offloads_by_policy(engine_config, mesh.device_type):
        options["offload_policy"] = CPUOffloadPolicy()
    precision = mixed_precision_policy(engine_config)
    exact = dataclasses.replace(precision, param_dtype=torch.float32)
    layers = shard_targets(module.hf_model, engine_config.wrap_policy)
    for layer in layers:
        fully_shard(layer, mp_policy=precision, **options)
    for part in module.exact_parts:
        fully_shard(part, mp_policy=exact, **options)
    fully_shard(module, mp_policy=precision, **options)
    if engine_config.forward_prefetch:
        _prefetch_forward(layers)


def _prefetch_forward(layers: Sequence[nn.Module]) -> None:
    for layer, following in pairwise(layers):
        assert isinstance(layer, FSDPModule) and isinstance(following, FSDPModule)
        layer.set_modules_to_forward_prefetch([following])


def offloads_by_policy(engine_config: Any, device_type: str) -> bool:
    """Whether `offload_policy` has something to move: on a CPU everything is in host memory anyway."""
    return bool(engine_config.offload_policy) and device_type != "cpu"


def computes_as_stored(engine_config: Any, stored: torch.dtype, exact_parts: Iterable[nn.Module]) -> bool:
    """Whether every part of a model stored in `stored` computes in it."""
    return mixed_precision_policy(engine_config).param_dtype is stored and (
        stored is torch.float32 or not list(exact_parts)
    )


def shard_targets(hf_model: Any, wrap_policy: Any = None) -> list[nn.Module]:
    """The transformer layers, each of which becomes one group of sharded parameters.

    Args:
        hf_model: names its layer classes in `_no_split_modules`.
        wrap_policy: `transformer_layer_cls_to_wrap`, class names instead of the model's own; `disable`: no groups
            beside the root's.

    Raises:
        ConfigError: an unknown or unsupported key, or no layer of these classes.
    """
    policy = dict(wrap_policy or {})
    if unknown := sorted(set(policy) - set(_WRAP_KEYS)):
        raise ConfigError(f"fsdp_config.wrap_policy has {unknown}; it knows {', '.join(_WRAP_KEYS)}")
    if policy.get("min_num_params"):
        raise ConfigError(
            f"fsdp_config.wrap_policy.min_num_params={policy['min_num_params']}: wrapping by size is FSDP1's; layers "
            "are wrapped by class here. Set it to 0, or name classes in wrap_policy.transformer_layer_cls_to_wrap."
        )
    if policy.get("disable"):
        return []
    named = policy.get("transformer_layer_cls_to_wrap") or getattr(hf_model, "_no_split_modules", None) or []
    names = {named} if isinstance(named, str) else set(named)
    layers = [module for module in hf_model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(
            f"{type(hf_model).__name__} has no layer of class {sorted(names) or '(none named)'} to shard by; set "
            "fsdp_config.wrap_policy.transformer_layer_cls_to_wrap to the class of its layers"
        )
    return layers


def mixed_precision_policy(engine_config: Any) -> MixedPrecisionPolicy:
    """Compute and reduction precision: `mixed_precision` where given, else bf16 or fp32 by `dtype`, reduced in fp32.

    Raises:
        ConfigError: fp16, whose gradients would need a loss scale that this engine does not have; an unknown key; a
            `buffer_dtype` other than fp32, since fully_shard leaves buffers as they are.
    """
    given = dict(engine_config.mixed_precision or {})
    if unknown := sorted(set(given) - set(_PRECISIONS)):
        raise ConfigError(f"fsdp_config.mixed_precision has {unknown}; it knows {', '.join(_PRECISIONS)}")
    param = parse_dtype(given.get("param_dtype", engine_config.dtype), "fsdp_config.dtype")
    reduce = parse_dtype(given.get("reduce_dtype", "fp32"), "fsdp_config.mixed_precision.reduce_dtype")
    buffers = parse_dtype(given.get("buffer_dtype", "fp32"), "fsdp_config.mixed_precision.buffer_dtype")
    if torch.float16 in (param, reduce):
        raise ConfigError(
            "float16 training needs loss scaling, which the FSDP engine does not do; use fsdp_config.dtype=bfloat16"
        )
    if buffers is not torch.float32:
        raise ConfigError(
            f"fsdp_config.mixed_precision.buffer_dtype={given['buffer_dtype']}: fully_shard leaves buffers (rotary "
            "frequencies, mostly) in the precision they are stored in; use fp32"
        )
    # Inputs need no cast: activations have the dtype of the embedding they start from. A cast would also copy the
    # attention layout and round the temperatures that travel with it.
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, cast_forward_inputs=False)


def reshard(module: nn.Module) -> None:
    """Free gathered weights, so that parameters are the sharded ones again."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
