"""Keyword arguments of a `RayWorkerGroup`, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.single_controller.base.context import WorkerContext
from rlflow.single_controller.ray.pool import RayResourcePool
from rlflow.utils.device import DEVICE_ENV
from rlflow.utils.errors import ConfigError

CALL_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Settings:
    """Checked keyword arguments of a group; see `RayWorkerGroup`."""

    device_name: str
    use_gpu: bool
    master: tuple[str, int] | None
    master_port_range: tuple[int, int] | None
    worker_env: dict[str, str]
    call_timeout_s: float
    profile_steps: Sequence[int] | None
    nsight_options: Mapping[str, Any] | None

    @classmethod
    def read(cls, kwargs: dict[str, Any], pool: RayResourcePool | None, prefix: str) -> Settings:
        """Check and complete; `ConfigError` names what contradicts what."""
        known = {
            "device_name", "use_gpu", "master_addr", "master_port", "master_port_range", "worker_env", "call_timeout_s",
            "profile_steps", "worker_nsight_options",
        }  # fmt: skip
        unknown = sorted(set(kwargs) - known)
        if unknown:
            raise ConfigError(f"RayWorkerGroup does not know {unknown}; it takes {sorted(known)}")
        device = kwargs.get("device_name") or (pool.device_name if pool else "cuda")
        if pool is not None and device != pool.device_name:
            raise ConfigError(f"device_name={device!r}, but the pool {pool.name_prefix!r} is for {pool.device_name!r}")
        address, port = kwargs.get("master_addr"), kwargs.get("master_port")
        if (address is None) != (port is None):
            raise ConfigError(f"master_addr={address!r} and master_port={port!r}: set both or none")
        env = {str(key): str(value) for key, value in (kwargs.get("worker_env") or {}).items()}
        ours = sorted(set(env) & {*WorkerContext().to_env(), DEVICE_ENV})
        if ours:
            raise ConfigError(f"worker_env sets {ours}, which the worker group {prefix!r} sets itself")
        return cls(
            device_name=device,
            use_gpu=bool(kwargs.get("use_gpu", True)) and device != "cpu",
            master=None if address is None else (str(address), int(port)),  # type: ignore[arg-type]
            master_port_range=kwargs.get("master_port_range"),
            worker_env=env,
            call_timeout_s=float(kwargs.get("call_timeout_s", CALL_TIMEOUT_S)),
            profile_steps=kwargs.get("profile_steps"),
            nsight_options=kwargs.get("worker_nsight_options"),
        )

    def nsight(self) -> dict[str, Any]:
        """The part of a runtime environment that starts a process under nsys, if asked for."""
        if not self.profile_steps or self.device_name != "cuda" or self.nsight_options is None:
            return {}
        options = dict(self.nsight_options)
        if options.get("capture-range-end") is None:
            options["capture-range-end"] = f"repeat-shutdown:{6 * len(self.profile_steps)}"
        return {"nsight": options}
