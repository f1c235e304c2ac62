"""State that waits in host memory while another role uses the device.

param_offload        weights and gradients go to the CPU at the end of a mode and come back at the start of the next
optimizer_offload    optimizer state the same, for `train` only
grad_offload         says no more than param_offload: gradients live with their parameters
offload_policy       fully_shard's own: shards are in host memory always (see sharding.py), so nothing is moved here
"""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from rlflow.utils.device import get_torch_device
from rlflow.utils.errors import ConfigError
from rlflow.workers.engine.fsdp.sharding import offloads_by_policy, reshard

logger = logging.getLogger(__name__)

_KEYS = ("param_offload", "optimizer_offload", "grad_offload", "offload_policy")


def moves_parameters(engine_config: Any, device_type: str) -> bool:
    """Whether parameters wait on the CPU between modes."""
    return bool(engine_config.param_offload) and _moves(engine_config, device_type)


def moves_optimizer(engine_config: Any, device_type: str) -> bool:
    """Whether optimizer state waits on the CPU between modes."""
    return bool(engine_config.optimizer_offload) and _moves(engine_config, device_type)


def _moves(engine_config: Any, device_type: str) -> bool:
    return device_type != "cpu" and not offloads_by_policy(engine_config, device_type)


def say_where_nothing_offloads(engine_config: Any, device_type: str) -> None:
    """One warning, on rank 0, when offloading is asked for on a CPU.

    Raises:
        ConfigError: gradients are to be offloaded without their parameters.
    """
    if engine_config.grad_offload and not engine_config.param_offload:
        raise ConfigError(
            "fsdp_config.grad_offload=true without param_offload: gradients live where their parameters are; set "
            "fsdp_config.param_offload=true too"
        )
    asked = [key for key in _KEYS if engine_config[key]]
    if asked and device_type == "cpu" and dist.get_rank() == 0:
        logger.warning(
            "%s has nothing to move on device cpu: all state is in host memory", ", ".join(f"{k}=true" for k in asked)
        )


def move_state(module: nn.Module | None, optimizer: Optimizer | None, target: torch.device) -> None:
    """Move weights with their gradients, and optimizer state; None: left where it is."""
    if module is not None:
        reshard(module)
        module.to(target)
    if optimizer is not None:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[key] = value.to(target, non_blocking=True)
    get_torch_device().synchronize()
    gc.collect()
    get_torch_device().empty_cache()
