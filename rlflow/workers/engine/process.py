"""What a process needs before an engine can run in it: threads, device, process group."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from rlflow.single_controller.base import WorkerContext
from rlflow.utils.determinism import determinism_seed, enable_full_determinism, is_full_determinism
from rlflow.utils.device import COLLECTIVE_TIMEOUT_ENV, get_device_name, get_nccl_backend, get_torch_device

COLLECTIVE_TIMEOUT_S = 600.0
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def prepare_process(context: WorkerContext) -> None:
    """Threads, device and process group of a worker process; what is set already stays.

    The thread count is OMP_NUM_THREADS, which the group derives from the cores and processes of the node: more threads
    than cores would spin on each other's barriers.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit():
        torch.set_num_threads(int(threads))
    if is_full_determinism():
        enable_full_determinism(determinism_seed())
    if get_device_name() != "cpu":
        get_torch_device().set_device(context.device_index)
    ensure_process_group(context)


def ensure_process_group(context: WorkerContext | None = None) -> None:
    """Start torch.distributed unless it runs: by the context, by torchrun's variables, or for this process only."""
    if dist.is_initialized():
        return
    backend = get_nccl_backend()
    if backend != "gloo":
        # Objects and token counts travel over gloo, tensors of the device over its own library.
        backend = f"cpu:gloo,{get_device_name()}:{backend}"
    if context is None and all(os.environ.get(name) for name in _RENDEZVOUS):
        context = WorkerContext.from_env()
    if context is None or context.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=collective_timeout())
        return
    method = os.environ.get("DIST_INIT_METHOD") or f"tcp://{context.master_addr}:{context.master_port}"
    dist.init_process_group(
        backend,
        init_method=method,
        rank=context.rank,
        world_size=context.world_size,
        timeout=collective_timeout(),
    )


def collective_timeout() -> timedelta:
    """How long a rank waits for its peers; the worker group says it (`actor_rollout_ref.nccl_timeout`)."""
    return timedelta(seconds=float(os.environ.get(COLLECTIVE_TIMEOUT_ENV) or COLLECTIVE_TIMEOUT_S))
