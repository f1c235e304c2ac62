"""Weights out of the sharded model: full tensors under Hugging Face names, and a folder that transformers loads."""

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
from rlflow.workers.engine.fsdp.model import PREFIX, PackedModel, reshard

logger = logging.getLogger(__name__)

SHARD_BYTES = MAX_FILE_BYTES


def hf_name(name: str) -> str:
    """Name in a Hugging Face checkpoint of a parameter of `PackedModel`."""
    return name.removeprefix(PREFIX)


def iter_full_tensors(module: PackedModel) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of every weight, one gathered at a time; a tied weight comes once. *Collective.*

    The tensors have the dtype of the stored weights, and on a single rank they share its memory: copy what you keep.
    """
    reshard(module)
    for name, value in _stored_tensors(module).items():
        yield name, _gather(value)


def _stored_tensors(module: PackedModel) -> dict[str, Tensor]:
    """Name -> weight as this rank stores it, of parameters and persistent buffers."""
    persistent = set(module.state_dict().keys())
    stored: dict[str, Tensor] = dict(module.named_parameters())
    stored |= {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    return {hf_name(name): value.detach() for name, value in stored.items()}


def _gather(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def save_hf_folder(
    module: PackedModel, model_config: Any, folder: Path, *, with_weights: bool, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config, generation config and tokenizer, and with `with_weights` the weights in `dtype`. *Collective.*"""
    writer = dist.get_rank() == 0
    if writer:
        folder.mkdir(parents=True, exist_ok=True)
        _save_configs(module.hf_model, model_config, folder, dtype)
    if with_weights:
        _save_weights(module, folder, dtype, writer)
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
    reshard(module)
    stored = _stored_tensors(module)
    specs = [
        TensorSpec(name, dtype if value.is_floating_point() else value.dtype, tuple(value.shape))
        for name, value in stored.items()
    ]
    if writer:
        write_weights(folder, specs, lambda name: (_gather(stored[name]),), max_bytes=SHARD_BYTES)
        return
    for part in plan_files(specs, SHARD_BYTES).values():
        for spec in part:
            _gather(stored[spec.name])  # in the writer's order, because it is a collective; the result is dropped
