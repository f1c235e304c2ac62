"""State of a worker on disk: shards of every rank in safetensors, everything else as JSON; no pickle.

    <local_path>/
        meta.json                          format, world size, what is in here
        model/index.json, rank_00000.safetensors, ...      see shards.py
        optimizer/index.json, rank_*.safetensors, state.json
        extra/rng_00000.safetensors, rng_00000.json, scheduler.json
        huggingface/                       config, tokenizer; weights with "hf_model"

Invariants
    - Any number of ranks can load what any number wrote: a rank reads the pieces that overlap its own shards.
    - With as many ranks as wrote, everything comes back bit for bit, random number generators included.
    - This module says what goes into plain files; when they are written and when they count (temporary folder,
      manifest, rename) is `rlflow.checkpoint`'s part.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlflow.checkpoint.shards import FORMAT, PendingFile, ShardReader, read_json
from rlflow.utils.device import get_device_name, get_torch_device
from rlflow.utils.errors import CheckpointError
from rlflow.workers.engine.fsdp.export import hf_name
from rlflow.workers.engine.fsdp.model import PackedModel
from rlflow.workers.engine.fsdp.sharding import reshard
from rlflow.workers.engine.fsdp.shards import local_part, read_into, shard_files

logger = logging.getLogger(__name__)


# ---- model and optimizer ---------------------------------------------------------------------------------------------


def _all_params(module: PackedModel) -> Iterator[tuple[str, Tensor]]:
    for name, param in module.named_parameters():
        yield hf_name(name), param


def _named_params(module: PackedModel) -> Iterator[tuple[str, Tensor]]:
    """What is saved: all parameters, or those that are trained."""
    for name, param in _all_params(module):
        if param.requires_grad or not module.saves_trained_only:
            yield name, param


def load_model(module: PackedModel, folder: Path) -> None:
    """Read the weights, or only the trained ones where none other are there. `CheckpointError` names what is missing or
    superfluous.
    """
    with ShardReader(folder) as reader:
        wanted = dict(_all_params(module))
        frozen = {name for name, param in wanted.items() if not param.requires_grad}
        if len(frozen) < len(wanted) and not frozen & set(reader.tensors):
            wanted = {name: param for name, param in wanted.items() if name not in frozen}
        missing, extra = sorted(set(wanted) - set(reader.tensors)), sorted(set(reader.tensors) - set(wanted))
        if missing or extra:
            raise CheckpointError(
                f"{folder} is no checkpoint of this model: it lacks {missing[:4]} and has {extra[:4]} besides"
            )
        for name, param in wanted.items():
            read_into(reader, name, param)


def _optimizer_tensors(module: PackedModel, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, param in _named_params(module):
        for key, value in sorted(optimizer.state.get(param, {}).items()):
            if isinstance(value, Tensor):
                if dist.get_world_size() > 1 and value.dim() and not isinstance(value, DTensor):
                    raise CheckpointError(
                        f"optimizer state {key} of {name} is no sharded tensor, so nobody knows whose is right; "
                        f"{type(optimizer).__name__} cannot be saved on several ranks"
                    )
                yield f"{key}/{name}", value


def optimizer_files(module: PackedModel, optimizer: Optimizer, folder: Path) -> Iterator[PendingFile]:
    """Tensors as shards, hyperparameters of the groups and other values as JSON. *Collective.*"""
    yield from shard_files(_optimizer_tensors(module, optimizer), folder)
    if dist.get_rank() == 0:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        values = {
            name: {k: v for k, v in optimizer.state.get(param, {}).items() if not isinstance(v, Tensor)}
            for name, param in _named_params(module)
        }
        state = {"class": type(optimizer).__name__, "groups": groups, "values": {k: v for k, v in values.items() if v}}
        yield PendingFile(folder / "state.json", json=state)


@torch.no_grad()
def load_optimizer(module: PackedModel, optimizer: Optimizer, folder: Path) -> None:
    """Restore `optimizer_files`. `CheckpointError` when it is the state of another optimizer class."""
    state = read_json(folder / "state.json")
    if state["class"] != type(optimizer).__name__ or len(state["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{folder} holds the state of {state['class']} with {len(state['groups'])} groups; optim.optimizer is "
            f"{type(optimizer).__name__}. Leave 'optimizer' out of checkpoint.load_contents to start it afresh."
        )
    for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()})
    params = dict(_named_params(module))
    optimizer.state.clear()
    with ShardReader(folder) as reader:
        for entry_name, entry in reader.tensors.items():
            key, name = entry_name.split("/", 1)
            param = params[name]
            dtype = getattr(torch, entry["dtype"])
            if entry["shape"] == list(param.shape):
                value: Tensor = torch.zeros_like(param, dtype=dtype)
            else:
                # Step counters: fused and capturable optimizers keep them beside the parameters.
                on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
                value = torch.zeros(
                    entry["shape"], dtype=dtype, device=local_part(param).device if on_device else "cpu"
                )
            read_into(reader, entry_name, value)
            optimizer.state[param][key] = value
    for name, values in state["values"].items():
        optimizer.state[params[name]].update(values)


# ---- schedule and random numbers -------------------------------------------------------------------------------------


def extra_files(scheduler: Any, folder: Path) -> Iterator[PendingFile]:
    """Schedule (rank 0) and random number generators (every rank)."""
    rank = dist.get_rank()
    tensors = {"torch": torch.get_rng_state()}
    if get_device_name() != "cpu":
        tensors["device"] = get_torch_device().get_rng_state().cpu()
    yield PendingFile(folder / f"rng_{rank:05d}.safetensors", tensors=tensors)
    name, keys, pos, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    others = {
        "numpy": [name, [int(k) for k in keys], int(pos), int(has_gauss), float(cached)],
        "python": [version, list(internal), gauss],
    }
    yield PendingFile(folder / f"rng_{rank:05d}.json", json=others)
    if rank == 0:
        state = {} if scheduler is None else _jsonable(scheduler.state_dict())
        yield PendingFile(folder / "scheduler.json", json={"scheduler": state})


def _jsonable(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without its functions, which are built from the config again."""
    return {key: value for key, value in state.items() if key != "lr_lambdas" and not callable(value)}


def load_extra(scheduler: Any, folder: Path, saved_world_size: int) -> None:
    """Restore `extra_files`; the generators only with as many ranks as wrote them."""
    if scheduler is not None:
        state = read_json(folder / "scheduler.json")["scheduler"]
        if "lr_lambdas" in scheduler.state_dict():
            state["lr_lambdas"] = [None] * len(scheduler.lr_lambdas)
        scheduler.load_state_dict(state)
    if saved_world_size != dist.get_world_size():
        logger.warning(
            "%s was written by %d ranks and is read by %d: random number generators start from the seed",
            folder,
            saved_world_size,
            dist.get_world_size(),
        )
        return
    rank = dist.get_rank()
    tensors = load_file(folder / f"rng_{rank:05d}.safetensors")
    torch.set_rng_state(tensors["torch"])
    if "device" in tensors and get_device_name() != "cpu":
        get_torch_device().set_rng_state(tensors["device"])
    others = read_json(folder / f"rng_{rank:05d}.json")
    name, keys, pos, has_gauss, cached = others["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), pos, has_gauss, cached))
    version, internal, gauss = others["python"]
    random.setstate((version, tuple(internal), gauss))


# ---- the whole -------------------------------------------------------------------------------------------------------


def state_files(
    module: PackedModel,
    optimizer: Optimizer | None,
    scheduler: Any,
    folder: Path,
    *,
    contents: Iterable[str],
    global_step: int,
) -> Iterator[PendingFile]:
    """The files of this rank for "model", "optimizer" and "extra" of `contents`; their tensors are the live ones.

    *Collective*: every rank must run the iterator to its end.
    """
    contents = set(contents)
    reshard(module)
    if "model" in contents:
        yield from shard_files(_named_params(module), folder / "model")
    if "optimizer" in contents and optimizer is not None:
        yield from optimizer_files(module, optimizer, folder / "optimizer")
    if "extra" in contents:
        yield from extra_files(scheduler, folder / "extra")
    if dist.get_rank() == 0:
        meta = {
            "format": FORMAT,
            "world_size": dist.get_world_size(),
            "global_step": global_step,
            "contents": sorted(contents),
        }
        yield PendingFile(folder / "meta.json", json=meta)


def load_state(
    module: PackedModel, optimizer: Optimizer | None, scheduler: Any, folder: Path, *, contents: Iterable[str]
) -> dict[str, Any]:
    """Restore `contents` of what `state_files` described; returns its meta data. *Collective.*

    Raises:
        CheckpointError: the folder is none of ours, or lacks something that is asked for.
    """
    contents = set(contents) - {"hf_model"}
    if not (folder / "meta.json").is_file():
        raise CheckpointError(f"{folder} holds no meta.json, so it is no checkpoint of an rlflow worker")
    meta = read_json(folder / "meta.json")
    if meta.get("format") != FORMAT:
        raise CheckpointError(f"{folder} has format {meta.get('format')!r}; this version reads {FORMAT!r}")
    missing = sorted(contents - set(meta["contents"]))
    if missing:
        raise CheckpointError(
            f"{folder} holds {meta['contents']}, but checkpoint.load_contents asks for "
            f"{missing} too; load less, or save more"
        )
    reshard(module)
    if "model" in contents:
        load_model(module, folder / "model")
    if "optimizer" in contents and optimizer is not None:
        load_optimizer(module, optimizer, folder / "optimizer")
    if "extra" in contents:
        load_extra(scheduler, folder / "extra", meta["world_size"])
    dist.barrier()
    return meta
