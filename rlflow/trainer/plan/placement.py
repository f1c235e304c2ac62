"""Processes of a run, where they live, and whether this machine has what they need."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.config.critic import need_critic
from rlflow.config.pools import GLOBAL_POOL, REF_POOL, REWARD_POOL, has_reference_model, pool_sizes


@dataclass(frozen=True)
class ProcessGroup:
    """`count` processes of one kind; `place` says on which devices, or "CPU"."""

    name: str
    count: int
    place: str


@dataclass(frozen=True)
class Placement:
    """Processes, and devices needed and found.

    Fields:
        pools: name of a pool -> devices on each of its nodes.
        cpus_needed: cores that compute at the same time; more processes than cores take turns.
        cpus_found, memory_found_bytes, gpus_found: of this machine.
        short_of: what is missing, one sentence each; empty when the run fits.
        remarks: what this machine cannot tell.
    """

    device: str
    nodes: int
    pools: dict[str, list[int]]
    processes: list[ProcessGroup]
    devices_needed: int
    gpus_found: int
    cpus_needed: int
    cpus_found: int
    memory_found_bytes: int
    short_of: list[str]
    remarks: list[str]


def plan_placement(config: Any) -> Placement:
    """Processes of a checked configuration."""
    import psutil

    from rlflow.utils.device import cpu_cores

    trainer = config.trainer
    pools = pool_sizes(config)
    devices = sum(sum(pool) for pool in pools.values())
    cores, gpus = cpu_cores(), count_gpus()
    most_on_a_node = sum(max(pool) for pool in pools.values())
    remote = bool(os.environ.get("RAY_ADDRESS")) or int(trainer.nnodes) > 1
    short = []
    if trainer.device != "cpu" and not remote and most_on_a_node > gpus:
        short.append(f"{most_on_a_node} GPUs are needed on this machine, {gpus} found")
    remarks = ["only this machine was looked at; `rlflow doctor` asks the Ray cluster"] if remote else []
    return Placement(
        device=str(trainer.device),
        nodes=int(trainer.nnodes),
        pools=pools,
        processes=_processes(config, pools),
        devices_needed=devices,
        gpus_found=gpus,
        cpus_needed=most_on_a_node,
        cpus_found=cores,
        memory_found_bytes=int(psutil.virtual_memory().total),
        short_of=short,
        remarks=remarks,
    )


def count_gpus() -> int:
    """NVIDIA devices that this process may use, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])
    if visible is None:
        return there
    return min(there, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def devices_a_replica(config: Any) -> int:
    """Devices of one rollout replica; an engine that does not split a model serves from one."""
    from rlflow.workers.rollout.capabilities import CAPABILITIES

    rollout = config.actor_rollout_ref.rollout
    if not CAPABILITIES[rollout.name].tensor_parallel:
        return 1
    return int(rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size * rollout.data_parallel_size)


def _processes(config: Any, pools: dict[str, list[int]]) -> list[ProcessGroup]:
    rollout, device = config.actor_rollout_ref.rollout, str(config.trainer.device)
    ranks = sum(pools[GLOBAL_POOL])
    roles = ["actor"]
    if has_reference_model(config) and REF_POOL not in pools:
        roles.append("reference")
    roles += ["critic"] if need_critic(config) else []
    place = f"{device}, {GLOBAL_POOL}"
    groups = [ProcessGroup(f"trainer ({' + '.join(roles)})", ranks, place)]
    if REF_POOL in pools:
        groups.append(ProcessGroup("reference", sum(pools[REF_POOL]), f"{device}, {REF_POOL}"))
    devices = devices_a_replica(config)
    each = f"{devices} devices each" if devices > 1 else "beside the trainer"
    groups.append(ProcessGroup(f"rollout server ({rollout.name})", max(1, ranks // devices), f"{place}, {each}"))
    if config.reward.reward_model.enable:
        pool = REWARD_POOL if REWARD_POOL in pools else GLOBAL_POOL
        groups.append(ProcessGroup("reward model server", sum(pools[pool]), f"{device}, {pool}"))
    scorers = int(config.reward.num_workers) * int(config.reward.processes_per_worker)
    units = int(config.transfer_queue.backend.SimpleStorage.num_data_storage_units)
    return [
        *groups,
        ProcessGroup("agent-loop worker", int(rollout.agent.num_workers), "CPU"),
        ProcessGroup("reward worker", int(config.reward.num_workers), "CPU"),
        ProcessGroup("scorer process", scorers, "CPU"),
        ProcessGroup("TransferQueue controller", 1, "CPU"),
        ProcessGroup("TransferQueue storage unit", units, "CPU"),
        ProcessGroup("request balancer", 1, "CPU"),
        ProcessGroup("task runner (the trainer's loop)", 1, "CPU"),
    ]
