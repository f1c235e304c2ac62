"""Weights out of the sharded model: full tensors under Hugging Face names, and a folder that transformers loads."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlflow.utils.errors import CheckpointError
from rlflow.workers.engine.fsdp.model import PREFIX, PolicyModel, reshard
from rlflow.workers.engine.fsdp.shards import write_tensors

logger = logging.getLogger(__name__)

# The size at which transformers starts a new file.
SHARD_BYTES = 5 * 10**9


def hf_name(name: str) -> str:
    """Name in a Hugging Face checkpoint of a parameter of `PolicyModel`."""
    return name.removeprefix(PREFIX)


def iter_full_tensors(policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of every weight, one gathered at a time; a tied weight comes once. *Collective.*

    The tensors have the dtype of the stored weights, and on a single rank they share its memory: copy what you keep.
    """
    reshard(policy)
    for name, param in policy.named_parameters():
        value = param.detach()
        yield hf_name(name), value.full_tensor() if isinstance(value, DTensor) else value
    persistent = set(policy.state_dict().keys())
    for name, buffer in policy.named_buffers():
        if name in persistent:
            yield hf_name(name), buffer.detach()


def save_hf_folder(
    policy: PolicyModel, model_config: Any, folder: Path, *, with_weights: bool, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config, generation config and tokenizer, and with `with_weights` the weights in `dtype`. *Collective.*"""
    writer = dist.get_rank() == 0
    if writer:
        folder.mkdir(parents=True, exist_ok=True)
        _save_configs(policy.causal_lm, model_config, folder, dtype)
    if with_weights:
        _save_weights(policy, folder, dtype, writer)
    dist.barrier()


def _save_configs(causal_lm: Any, model_config: Any, folder: Path, dtype: torch.dtype) -> None:
    from transformers import AutoTokenizer

    config = type(causal_lm.config).from_dict(causal_lm.config.to_dict())
    config.dtype = dtype
    config.architectures = [type(causal_lm).__name__]
    config.save_pretrained(folder)
    if getattr(causal_lm, "generation_config", None) is not None:
        causal_lm.generation_config.save_pretrained(folder)
    try:
        source = Path(model_config.tokenizer_source).expanduser()
        tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=model_config.trust_remote_code)
    except (OSError, ValueError) as error:
        # Training needs no tokenizer; a folder without one still holds the model.
        logger.warning("no tokenizer at %s, %s gets none: %s", model_config.tokenizer_source, folder, error)
        return
    tokenizer.save_pretrained(folder)


def _save_weights(policy: PolicyModel, folder: Path, dtype: torch.dtype, writer: bool) -> None:
    """safetensors files of at most `SHARD_BYTES`, with an index when there are several."""
    files: list[dict[str, Tensor]] = [{}]
    written: dict[str, str] = {}
    size = total = 0

    def flush() -> None:
        name = f"part-{len(files):05d}.safetensors"
        write_tensors(files[-1], folder / name)
        written.update({key: name for key in files[-1]})

    for name, tensor in iter_full_tensors(policy):
        if not writer:
            continue  # gathered, because that is a collective, and dropped
        value = tensor.to(dtype if tensor.is_floating_point() else tensor.dtype).cpu().contiguous()
        # A tensor that shares memory with the model must not be written while it could change.
        value = value.clone() if value.data_ptr() == tensor.data_ptr() else value
        if files[-1] and size + value.nbytes > SHARD_BYTES:
            flush()
            files[-1] = {}
            files.append({})
            size = 0
        files[-1][name] = value
        size += value.nbytes
        total += value.nbytes
    if not writer:
        return
    if not files[-1]:
        raise CheckpointError(f"the model has no weights to export to {folder}")
    flush()
    _name_files(folder, written, len(files), total)


def _name_files(folder: Path, written: dict[str, str], count: int, total: int) -> None:
    if count == 1:
        (folder / "part-00001.safetensors").rename(folder / "model.safetensors")
        return
    final = {f"part-{i:05d}.safetensors": f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)}
    for old, new in final.items():
        (folder / old).rename(folder / new)
    index = {"metadata": {"total_size": total}, "weight_map": {key: final[name] for key, name in written.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
