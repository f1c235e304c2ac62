"""Weights out of the sharded model: full tensors under Hugging Face names, and a folder that transformers loads.

Adapters never show in the names: a weight that has one comes out with it added.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlflow.checkpoint.hf_weights import MAX_FILE_BYTES, TensorSpec, plan_files, write_weights
from rlflow.utils.errors import ContractError
from rlflow.utils.moe_weights import expert_parts, splits_experts
from rlflow.workers.engine.fsdp import lora
from rlflow.workers.engine.fsdp.model import PREFIX, PackedModel
from rlflow.workers.engine.fsdp.sharding import reshard

logger = logging.getLogger(__name__)

SHARD_BYTES = MAX_FILE_BYTES


def hf_name(name: str) -> str:
    """Name in a Hugging Face checkpoint of a parameter of `PackedModel`."""
    return lora.plain_name(name.removeprefix(PREFIX))


def iter_full_tensors(module: PackedModel, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of every weight, one gathered at a time; a tied weight comes once, packed experts one by one.
    *Collective.*

    The tensors have the dtype of the stored weights (fp32 where an adapter is merged in), and on a single rank they
    share its memory: copy what you keep. Without `merged` they are those beside the adapter.
    """
    stored = _Stored(module, merged=merged)
    for name in stored.tensors:
        yield from stored.parts(name).items()


def iter_adapter_tensors(module: PackedModel) -> Iterator[tuple[str, Tensor]]:
    """(name in PEFT's files, full tensor) of every part of the adapter. *Collective.*"""
    reshard(module)
    for name, value in lora.trained_tensors(module.hf_model).items():
        yield name, _gather(value)


def adapter_facts(module: PackedModel) -> dict[str, Any]:
    """PEFT's config as plain values, and `scaling`: adapted module -> factor of its product.

    Raises:
        ContractError: the model has no adapter.
    """
    config = module.adapter_config
    if config is None:
        raise ContractError("base_sync_done asks for the adapter apart, but no adapter is trained (model.lora_rank=0)")
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    parts = lora.adapted_weights(module.hf_model).items()
    scaling = {hf_name(name).removesuffix(".weight"): part.scaling for name, part in parts}
    return {**values, "scaling": scaling}


class _Stored:
    """The weights of a model as this rank stores them: `tensors` by name, of parameters and persistent buffers.

    What leaves it are `parts`: a weight under its name, or one matrix an expert where checkpoints have it so.
    """

    def __init__(self, module: PackedModel, *, merged: bool = True) -> None:
        reshard(module)
        persistent = set(module.state_dict().keys())
        stored: dict[str, Tensor] = dict(module.named_parameters())
        stored |= {name: buffer for name, buffer in module.named_buffers() if name in persistent}
        self.tensors = {hf_name(n): value.detach() for n, value in stored.items() if not lora.is_adapter(n)}
        self._adapted = lora.adapted_weights(module.hf_model) if merged else {}
        self._splits = splits_experts(module.hf_model.config.get_text_config())

    def whole(self, name: str) -> Tensor:
        """The full tensor, its adapter merged in. *Collective.*"""
        weight = _gather(self.tensors[name])
        return self._adapted[name].merged(weight, _gather) if name in self._adapted else weight

    def parts(self, name: str) -> dict[str, Tensor]:
        """The full tensor in the parts, and under the names, that checkpoints have. *Collective.*"""
        weight = self.whole(name)
        return expert_parts(name, weight) if self._splits else {name: weight}

    def specs(self, dtype: torch.dtype) -> dict[str, list[TensorSpec]]:
        """Of the parts of each weight, for a file whose floating-point tensors are of `dtype`."""

        def of(name: str, value: Tensor) -> list[TensorSpec]:
            kind = dtype if value.is_floating_point() else value.dtype
            form = torch.empty(value.shape, device="meta")
            parts = expert_parts(name, form) if self._splits else {name: form}
            return [TensorSpec(part, kind, tuple(view.shape)) for part, view in parts.items()]

        return {name: of(name, value) for name, value in self.tensors.items()}


def save_adapter(module: PackedModel, model_config: Any, folder: Path) -> None:
    """Write the adapter (and a critic's head) as a PEFT folder. *Collective.*"""
    reshard(module)
    stored = lora.trained_tensors(module.hf_model, module.head_name)
    tensors = {name: _gather(value) for name, value in stored.items()}
    if dist.get_rank() == 0:
        scaling = {name: part.scaling for name, part in lora.adapted_weights(module.hf_model).items()}
        lora.write_adapter(folder, module.adapter_config, tensors, model_config.path, scaling, module.head_name)


def _gather(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def save_hf_folder(
    module: PackedModel, model_config: Any, folder: Path, *, with_weights: bool, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config, generation config and tokenizer, and with `with_weights` the weights in `dtype`; beside the folder
    an adapter, where there is one. *Collective.*
    """
    writer = dist.get_rank() == 0
    if writer:
        folder.mkdir(parents=True, exist_ok=True)
        _save_configs(module.hf_model, model_config, folder, dtype)
    if with_weights:
        _save_weights(module, folder, dtype, writer)
    if module.adapter_config is not None:
        save_adapter(module, model_config, folder.parent / lora.ADAPTER_FOLDER)
    dist.barrier()


def _save_configs(hf_model: Any, model_config: Any, folder: Path, dtype: torch.dtype) -> None:
    from transformers import AutoTokenizer

    config = type(hf_model.config).from_dict(hf_model.config.to_dict())
    config.dtype = dtype
    config.architectures = [type(hf_model).__name__]
    config.save_pretrained(folder)
    if getattr(hf_model, "generation_config", None) is not None:
        hf_model.generation_config.save_pretrained(folder)
    try:
        source = Path(model_config.tokenizer_source).expanduser()
        tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=model_config.trust_remote_code)
    except (OSError, ValueError) as error:
        # Training needs no tokenizer; a folder without one still holds the model.
        logger.warning("no tokenizer at %s, %s gets none: %s", model_config.tokenizer_source, folder, error)
        return
    tokenizer.save_pretrained(folder)


def _save_weights(module: PackedModel, folder: Path, dtype: torch.dtype, writer: bool) -> None:
    """safetensors files of at most `SHARD_BYTES`, with an index for several; one tensor is gathered at a time."""
    stored = _Stored(module)
    by_weight = stored.specs(dtype)
    specs = [spec for parts in by_weight.values() for spec in parts]
    source = {spec.name: name for name, parts in by_weight.items() for spec in parts}
    last: tuple[str, dict[str, Tensor]] = ("", {})

    def part(name: str) -> tuple[Tensor]:
        """Gathers a weight once for all its parts, which follow each other."""
        nonlocal last
        if last[0] != source[name]:
            last = ("", {})
            last = (source[name], stored.parts(source[name]))
        return (last[1][name],)

    if writer:
        write_weights(folder, specs, part, max_bytes=SHARD_BYTES)
        return
    for planned in plan_files(specs, SHARD_BYTES).values():
        for spec in planned:
            part(spec.name)  # in the writer's order, because it is a collective; the result is dropped
