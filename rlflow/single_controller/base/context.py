"""Where a worker stands in its group: rank, world, node, rendezvous.

A worker group gives each process its context through environment variables (those of `torchrun`, so that a worker class
also runs under it); a test passes a `WorkerContext` and needs none.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from rlflow.utils.errors import ConfigError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class WorkerContext:
    """Place of one worker process.

    Attributes:
        rank: 0 .. world_size - 1.
        world_size: processes in the group.
        local_rank: place among the group's processes on this node.
        local_world_size: the group's processes on this node.
        master_addr: host of rank 0, as the others reach it.
        master_port: port for `torch.distributed`.
        device_index: index of the process's device among those it sees: 0 where Ray shows it one GPU only.
        group: name prefix of the worker group.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    device_index: int = 0
    group: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is outside a world of {self.world_size}; ranks count from 0")

    @classmethod
    def single(cls) -> WorkerContext:
        """The context of a process on its own, with a free port."""
        return cls(master_port=free_port())

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> WorkerContext:
        """Read RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (needed) and the LOCAL_* variables.

        Raises:
            ConfigError: a needed variable is missing.
        """
        env = os.environ if env is None else env
        missing = [name for name in _NEEDED if not env.get(name)]
        if missing:
            raise ConfigError(
                f"a Worker was built outside a worker group: {', '.join(missing)} not in the environment. Start it "
                "through a RayWorkerGroup or torchrun, or pass context=WorkerContext.single()."
            )
        device_index = int(env.get("LOCAL_RANK", "0"))
        return cls(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            # Where each process sees one device only, LOCAL_RANK is that device's index, not the place on the node.
            local_rank=int(env.get("RAY_LOCAL_RANK", device_index)),
            local_world_size=int(env.get("RAY_LOCAL_WORLD_SIZE", env.get("LOCAL_WORLD_SIZE", "1"))),
            master_addr=env["MASTER_ADDR"],
            master_port=int(env["MASTER_PORT"]),
            device_index=device_index,
            group=env.get("WG_PREFIX", ""),
        )

    def to_env(self) -> dict[str, str]:
        """The variables `from_env` reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.device_index),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "RAY_LOCAL_RANK": str(self.local_rank),
            "RAY_LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "WG_PREFIX": self.group,
            "WG_BACKEND": "ray",
        }


def free_port(address: str = "127.0.0.1", ports: range | None = None) -> int:
    """A TCP port of this machine that was free just now: any, or the first free one of `ports`.

    Raises:
        ConfigError: no port of the range is free.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in [0] if ports is None else ports:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ConfigError(f"no free port at {address} in {ports}; choose another master_port_range")


def normalise_visible_devices(env: MutableMapping[str, str]) -> None:
    """Leave CUDA_VISIBLE_DEVICES as the one variable that limits visible GPUs, in place.

    ROCm knows three names. HIP_VISIBLE_DEVICES means the same as CUDA's and moves there; ROCR_VISIBLE_DEVICES renumbers
    the devices below them, so that together with another one it would select twice.

    Raises:
        ConfigError: (a ValueError) HIP and CUDA disagree, or ROCR is set beside one of them.
    """
    cuda, hip, rocr = (env.get(f"{name}_VISIBLE_DEVICES") for name in ("CUDA", "HIP", "ROCR"))
    if hip is not None:
        if cuda is not None and cuda != hip:
            raise ConfigError(f"HIP_VISIBLE_DEVICES={hip} and CUDA_VISIBLE_DEVICES={cuda} disagree; set one of them")
        cuda = env["CUDA_VISIBLE_DEVICES"] = env.pop("HIP_VISIBLE_DEVICES")
    if rocr is not None:
        if cuda is not None:
            raise ConfigError("ROCR_VISIBLE_DEVICES is set beside CUDA_ or HIP_VISIBLE_DEVICES; set one of them")
        env["CUDA_VISIBLE_DEVICES"] = env.pop("ROCR_VISIBLE_DEVICES")
