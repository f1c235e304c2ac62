"""The device this process computes on, behind one small interface.

Invariants
    - Importing this module imports no torch: a controller or a reward worker may ask for the Ray resource name or
      the number of cores without paying for it.
    - `cpu` is a platform like any other (collectives over gloo, memory figures of the process), so that callers
      never branch on "is there a GPU".
    - `RLFLOW_DEVICE` decides when it is set (worker processes inherit it from their group); otherwise `cuda` where
      torch sees a device, else `cpu`. It is read at each call, so that a process can be pinned late.

A further accelerator registers itself: `PlatformRegistry.register("npu", NpuPlatform())`.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any

import psutil

from rlflow.utils.errors import ConfigError

logger = logging.getLogger(__name__)

# Seconds a collective may take; a worker group sets it for its processes.
COLLECTIVE_TIMEOUT_ENV = "RLFLOW_COLLECTIVE_TIMEOUT_S"
DEVICE_ENV = "RLFLOW_DEVICE"


class CpuDevice:
    """The part of `torch.cuda` that rlflow uses, for the CPU. Memory figures are those of this process, in bytes."""

    @staticmethod
    def is_available() -> bool:
        """Always true."""
        return True

    @staticmethod
    def is_initialized() -> bool:
        """Always true: there is no context to create."""
        return True

    @staticmethod
    def device_count() -> int:
        """One: a process has one CPU device, whatever its number of cores."""
        return 1

    @staticmethod
    def current_device() -> str:
        """`"cpu"`: unlike an index it is valid in `tensor.to(...)` (an index would mean a CUDA device)."""
        return "cpu"

    @staticmethod
    def set_device(device: Any) -> None:
        """Nothing to select."""

    @staticmethod
    def synchronize(device: Any = None) -> None:
        """Nothing is queued: CPU operations are complete when they return."""

    @staticmethod
    def empty_cache() -> None:
        """No caching allocator to empty."""

    @staticmethod
    def ipc_collect() -> None:
        """No device memory to collect."""

    @staticmethod
    def manual_seed(seed: int) -> None:
        """Seed torch's CPU generator."""
        import torch

        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    @staticmethod
    def get_rng_state(device: Any = None) -> Any:
        """State of torch's CPU generator, a uint8 tensor."""
        import torch

        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: Any, device: Any = None) -> None:
        """Restore a state that `get_rng_state` returned."""
        import torch

        torch.set_rng_state(state)

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        """Resident bytes of this process now."""
        return psutil.Process().memory_info().rss

    @staticmethod
    def max_memory_allocated(device: Any = None) -> int:
        """Peak resident bytes of this process since it started."""
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        """The kernel keeps the peak of a process; it cannot be reset."""

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        """(available, total) bytes of the machine, reclaimable cache counting as available."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total


class Platform:
    """What rlflow must know of an accelerator: names, collectives and whether it is here."""

    device_name = "cpu"
    vendor = "cpu"
    collective_backend = "gloo"
    ray_resource = "CPU"
    visible_devices_env = ""
    ipc_supported = False

    def is_available(self) -> bool:
        """Whether this process can use the device."""
        return True

    def device_module(self) -> Any:
        """`torch.cuda` or an object with the same functions."""
        return CpuDevice

    def capability(self, device_id: int = 0) -> tuple[int | None, int | None]:
        """(major, minor) compute capability; (None, None) where the notion does not exist."""
        return (None, None)

    def set_expandable_segments(self, enable: bool) -> None:
        """Let the caching allocator grow its segments; nothing to do without one."""


class CudaPlatform(Platform):
    """NVIDIA GPUs, and AMD ones through torch's ROCm build, which answers under the same names."""

    device_name = "cuda"
    collective_backend = "nccl"
    ray_resource = "GPU"
    visible_devices_env = "CUDA_VISIBLE_DEVICES"
    ipc_supported = True

    @property
    def vendor(self) -> str:  # type: ignore[override]
        """`"amd"` for a ROCm build of torch, else `"nvidia"`."""
        import torch

        return "amd" if torch.version.hip else "nvidia"

    def is_available(self) -> bool:
        """Whether torch sees a CUDA device."""
        import torch

        return torch.cuda.is_available()

    def device_module(self) -> Any:
        """`torch.cuda`."""
        import torch

        return torch.cuda

    def capability(self, device_id: int = 0) -> tuple[int | None, int | None]:
        """For example (9, 0)."""
        import torch

        return torch.cuda.get_device_capability(device_id)

    def set_expandable_segments(self, enable: bool) -> None:
        """Weights shared over CUDA IPC need this off; long-context training wants it on."""
        import torch

        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{enable}")


class PlatformRegistry:
    """Platforms by device name, in the order in which they are tried; `cpu` is the last resort."""

    _platforms: dict[str, Platform] = {"cuda": CudaPlatform(), "cpu": Platform()}

    @classmethod
    def register(cls, name: str, platform: Platform) -> None:
        """Add a platform. It is preferred over those already there when it is available."""
        cls._platforms = {name: platform, **cls._platforms}

    @classmethod
    def get(cls, name: str) -> Platform:
        """Return the platform of that name; `ConfigError` when nobody registered it."""
        try:
            return cls._platforms[name]
        except KeyError:
            known = ", ".join(sorted(cls._platforms))
            raise ConfigError(
                f"device {name!r} is not known. Known: {known}. Set trainer.device (or {DEVICE_ENV}) to one of them."
            ) from None

    @classmethod
    def prefers(cls, name: str) -> bool:
        """Whether no platform is tried before this one."""
        return next(iter(cls._platforms)) == name

    @classmethod
    def detect(cls) -> Platform:
        """Return the first available platform."""
        return next(p for p in cls._platforms.values() if p.is_available())


_detected: Platform | None = None


def get_platform() -> Platform:
    """Return the platform of this process (`RLFLOW_DEVICE`, else the detected one)."""
    global _detected
    name = os.environ.get(DEVICE_ENV)
    if name:
        return PlatformRegistry.get(name)
    if _detected is None:
        _detected = PlatformRegistry.detect()
    return _detected


def get_device_name() -> str:
    """`"cuda"`, `"cpu"` or the name of a registered platform."""
    return get_platform().device_name


def get_torch_device() -> Any:
    """`torch.cuda`, or for the CPU a stand-in with the same functions (`CpuDevice`)."""
    return get_platform().device_module()


def get_device_id() -> int | str:
    """Index of the current CUDA device; `"cpu"` on the CPU. Both are valid in `tensor.to(...)`."""
    return get_torch_device().current_device()


def get_device() -> Any:
    """The current device as a `torch.device`."""
    import torch

    device_id = get_device_id()
    return torch.device(device_id) if isinstance(device_id, str) else torch.device(get_device_name(), device_id)


def get_nccl_backend() -> str:
    """Backend for `torch.distributed.init_process_group`: `"nccl"` or `"gloo"`."""
    return get_platform().collective_backend


def get_visible_devices_keyword(device_name: str | None = None) -> str:
    """Environment variable that limits the visible devices; `""` on the CPU, which has none."""
    platform = PlatformRegistry.get(device_name) if device_name else get_platform()
    return platform.visible_devices_env


def get_resource_name(device_name: str | None = None) -> str:
    """Ray's name for the device: `"GPU"` or `"CPU"`."""
    platform = PlatformRegistry.get(device_name) if device_name else get_platform()
    return platform.ray_resource


def get_vendor() -> str:
    """`"nvidia"`, `"amd"` or `"cpu"`."""
    return get_platform().vendor


def get_device_capability(device_id: int = 0) -> tuple[int | None, int | None]:
    """(major, minor) compute capability, (None, None) on the CPU."""
    return get_platform().capability(device_id)


def set_expandable_segments(enable: bool) -> None:
    """Switch the caching allocator's expandable segments; a no-op on the CPU."""
    get_platform().set_expandable_segments(enable)


def is_support_ipc() -> bool:
    """Whether device memory can be shared between processes."""
    return get_platform().ipc_supported


def is_device_available(name: str) -> bool:
    """Whether `name` is a registered platform that this process can use."""
    return name in PlatformRegistry._platforms and PlatformRegistry.get(name).is_available()


def manual_seed(seed: int) -> None:
    """Seed torch on the CPU and on the current device."""
    import torch

    torch.manual_seed(seed)
    get_torch_device().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed torch on the CPU and on every visible device."""
    import torch

    torch.manual_seed(seed)
    get_torch_device().manual_seed_all(seed)


def auto_set_device(config: Any) -> None:
    """Set `config.trainer.device` to this machine's accelerator when it names another one.

    `cpu` is always respected, and a machine without an accelerator changes nothing: it may be the head node of a
    cluster whose workers have one.
    """
    trainer = getattr(config, "trainer", None)
    wanted = getattr(trainer, "device", None)
    if wanted in (None, "cpu"):
        return
    if wanted == "cuda" and not os.environ.get(DEVICE_ENV) and PlatformRegistry.prefers("cuda"):
        return  # torch, which takes seconds to import, could only find cuda or nothing
    here = get_device_name()
    if here in ("cpu", wanted):
        return
    logger.warning("trainer.device=%s is not on this machine, using %s", wanted, here)
    trainer.device = here  # type: ignore[union-attr]


def cpu_has_slow_bf16() -> bool:
    """Whether bf16 matrix products of this CPU are slower than fp32 ones: x86 without AMX."""
    if platform.machine() != "x86_64":
        return False
    try:
        return "amx_bf16" not in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def cpu_cores() -> int:
    """Cores this process may use: the smaller of its affinity and its cgroup's quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):  # no cgroup v2, or its root, which has no limit
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, math.ceil(int(quota) / int(period))))


def thread_environment(threads: int) -> dict[str, str]:
    """Environment of a process with that many compute threads, to be set before it starts.

    An idle thread waits awake for about 0.1 ms, then sleeps. A forward has hundreds of parallel regions, tens of
    microseconds apart: sleeping in between makes it 40 % slower on a quiet machine, while libgomp's default of
    milliseconds takes the cores from the process whose turn it is.
    """
    return {"OMP_NUM_THREADS": str(max(1, threads)), "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}


def __getattr__(name: str) -> Any:
    # Constants of the reference, computed on first use so that the import stays light.
    if name == "is_cuda_available":
        return is_device_available("cuda")
    if name == "is_npu_available":
        return is_device_available("npu")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
