"""Which ranks share what: shards of the weights, rows of a batch, tokens of a row.

    fsdp_size                          ranks that hold one copy of the weights between them; more ranks: replicas (HSDP)
    ulysses_sequence_parallel_size     neighbouring ranks that compute the same rows, each a part of their tokens

The two cut the same ranks independently: with 4 ranks, fsdp_size=2 and sequences over 2 ranks

    rank        0      1      2      3
    shard       0      1      0      1        mesh ("ddp", "fsdp")
    rows        0      0      1      1        mesh ("dp", "sp")
    tokens      0      1      0      1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlflow.utils.errors import ConfigError


@dataclass(frozen=True)
class RankPlaces:
    """This rank in the meshes of an engine.

    Attributes:
        shards: mesh of the weights, ("fsdp",) or ("ddp", "fsdp").
        dp_rank: which rows this rank computes.
        dp_size: into how many parts a batch is split.
        dp_group: ranks that compute the same part of the tokens of other rows.
        sp_rank: which part of the tokens of its rows this rank computes.
        sp_size: ranks that share rows.
        sp_group: those ranks; None for 1.
    """

    shards: DeviceMesh
    dp_rank: int
    dp_size: int
    dp_group: Any
    sp_rank: int = 0
    sp_size: int = 1
    sp_group: Any = None


def build_places(engine_config: Any, device_type: str) -> RankPlaces:
    """The meshes that the engine's options ask for, over all ranks. *Collective.*

    Raises:
        ConfigError: a size that does not divide the ranks, or sequence parallelism with padded rows.
    """
    shards = _shard_mesh(int(engine_config.fsdp_size), device_type)
    world, size = dist.get_world_size(), int(engine_config.ulysses_sequence_parallel_size)
    if size == 1:
        return RankPlaces(shards, dist.get_rank(), world, dist.group.WORLD)
    if size < 1 or world % size:
        raise ConfigError(
            f"ulysses_sequence_parallel_size={size} does not divide the {world} ranks of this engine; set it to 1, or "
            "trainer.n_gpus_per_node x nnodes to a multiple"
        )
    if not engine_config.use_remove_padding:
        raise ConfigError(
            f"ulysses_sequence_parallel_size={size} splits packed rows: you must enable `use_remove_padding` (of "
            "actor_rollout_ref.model, or critic.model)"
        )
    mesh = init_device_mesh(device_type, (world // size, size), mesh_dim_names=("dp", "sp"))
    return RankPlaces(
        shards=shards,
        dp_rank=mesh.get_local_rank("dp"),
        dp_size=world // size,
        dp_group=mesh.get_group("dp"),
        sp_rank=mesh.get_local_rank("sp"),
        sp_size=size,
        sp_group=mesh.get_group("sp"),
    )


def _shard_mesh(size: int, device_type: str) -> DeviceMesh:
    world = dist.get_world_size()
    if size == 0 or size < -1:
        raise ConfigError(f"fsdp_size={size} is no number of ranks; -1 shards over all of them")
    if size == -1 or size >= world:
        return init_device_mesh(device_type, (world,), mesh_dim_names=("fsdp",))
    if world % size:
        fitting = [n for n in range(1, world + 1) if world % n == 0]
        raise ConfigError(f"fsdp_size={size} does not divide {world} ranks; use -1 or one of {fitting}")
    return init_device_mesh(device_type, (world // size, size), mesh_dim_names=("ddp", "fsdp"))
