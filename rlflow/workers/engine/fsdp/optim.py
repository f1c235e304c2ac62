"""Optimizer, learning-rate schedule and gradient norm of the FSDP engine."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rlflow.utils.errors import ConfigError
from rlflow.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from rlflow.workers.engine.fsdp.shards import local_part


def build_optimizer(parameters: Iterable[nn.Parameter], config: Any) -> Optimizer:
    """The optimizer class `config.optimizer` of module `config.optimizer_impl`, over the parameters that are trained.

    Every class gets `lr` and `weight_decay`, those named *adam* or *ademamix* also `betas`; `override_optimizer_config`
    is added on top.

    Raises:
        ConfigError: the module or class does not exist or refuses an argument, or nothing is to be trained.
    """
    trained = [param for param in parameters if param.requires_grad]
    if not trained:
        raise ConfigError("the model has no parameter that requires a gradient; set forward_only for a frozen model")
    try:
        module = importlib.import_module(config.optimizer_impl)
        cls = getattr(module, config.optimizer)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"optim.optimizer={config.optimizer!r} of optim.optimizer_impl={config.optimizer_impl!r} cannot be loaded: "
            f"{error}. The usual values are AdamW and torch.optim."
        ) from error
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    name = config.optimizer.lower()
    if "adam" in name or "ademamix" in name:
        options["betas"] = tuple(config.betas)
    if (
        name.startswith("adam")
        and "fused" in inspect.signature(cls).parameters
        and cls.__module__.startswith("torch.optim")
    ):
        # One kernel per tensor list. The default loop pays the dispatch of sharded tensors for every small operation.
        # Adam's family only: torch's fused SGD refuses sharded tensors.
        options["fused"] = True
    options.update(config.override_optimizer_config or {})
    if options.get("foreach") and "fused" not in (config.override_optimizer_config or {}):
        options.pop("fused", None)
    try:
        return cls(trained, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optim.optimizer={config.optimizer} refused {options}: {error}") from error


def build_lr_scheduler(optimizer: Optimizer, config: Any) -> LambdaLR:
    """The schedule of an `FSDPOptimizerConfig`; one step per update, not per optimizer step.

    Warm-up steps: `lr_warmup_steps` when > 0, else `lr_warmup_steps_ratio` of the total.
    """
    total = config.total_training_steps
    warmup = config.lr_warmup_steps
    if warmup <= 0:
        warmup = int(config.lr_warmup_steps_ratio * max(0, total))
    if config.lr_scheduler_type == "constant":
        return get_constant_schedule_with_warmup(optimizer, warmup)
    if config.lr_scheduler_type == "cosine":
        if total <= 0:
            raise ConfigError("optim.lr_scheduler_type=cosine needs optim.total_training_steps; the trainer sets it")
        return get_cosine_schedule_with_warmup(
            optimizer,
            warmup,
            total,
            min_lr_ratio=config.min_lr_ratio or 0.0,
            num_cycles=config.num_cycles,
            zero_indexed_step=config.zero_indexed_step,
        )
    raise ConfigError(f"optim.lr_scheduler_type={config.lr_scheduler_type!r} is unknown; use constant or cosine")


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
    """The norm of all gradients over all ranks, after which they are scaled down to `max_norm` (None: left alone).

    A non-finite norm is returned without touching the gradients. *Collective.*
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    value = grad_norm(grads)
    if max_norm is not None and math.isfinite(value) and value > max_norm:
        # The small number is torch's, so that both clip alike.
        torch._foreach_mul_([local_part(grad) for grad in grads], max_norm / (value + 1e-6))
    return value


def grad_norm(grads: Iterable[Tensor]) -> float:
    """The 2-norm of gradients, each element of the whole model counted once. *Collective.*

    Gradients may be sharded over different dimensions of different meshes (data, tensor parallel), replicated, or plain
    tensors that are equal on all ranks. Squares are added in float64: a norm that float32 can hold never overflows.
    """
    shards: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for grad in grads:
        mesh: DeviceMesh | None = None
        dims: tuple[int, ...] = ()
        if isinstance(grad, DTensor):
            if any(placement.is_partial() for placement in grad.placements):
                whole = [Replicate() if place.is_partial() else place for place in grad.placements]
                grad = grad.redistribute(placements=whole)
            mesh = grad.device_mesh
            # Not `is_shard`: the placement of a dimension that tensor parallel and FSDP both split says no to it.
            dims = tuple(dim for dim, placement in enumerate(grad.placements) if not placement.is_replicate())
        shards.setdefault((mesh, dims), []).append(local_part(grad))
    total = 0.0
    for (mesh, dims), parts in shards.items():
        squares = torch.stack(torch._foreach_norm(parts)).double().square().sum()
        for dim in dims:
            assert mesh is not None
            dist.all_reduce(squares, group=mesh.get_group(dim))
        total += float(squares)
    return math.sqrt(total)
