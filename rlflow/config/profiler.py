"""Options of profilers: `global_profiler` and the `profiler` of each role. No profiler is in this version."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.base import BaseConfig

SAVE_PATH = "outputs/profile"


@dataclass
class NsightToolConfig(BaseConfig):
    """Nsight Systems, of one role."""

    discrete: bool = False


@dataclass
class NPUToolConfig(BaseConfig):
    """Ascend's profiler."""

    contents: list[str] = field(default_factory=list)
    level: str = "level0"
    analysis: bool = True
    discrete: bool = False


@dataclass
class TorchProfilerScheduleConfig(BaseConfig):
    """Arguments of `torch.profiler.schedule`, in steps."""

    skip_first: int = 0
    wait: int = 0
    warmup: int = 0
    active: int = 0
    repeat: int = 0


@dataclass
class TorchProfilerToolConfig(BaseConfig):
    """torch.profiler."""

    contents: list[str] = field(default_factory=list)
    discrete: bool = False
    schedule: TorchProfilerScheduleConfig = field(default_factory=TorchProfilerScheduleConfig)


@dataclass
class TorchMemoryToolConfig(BaseConfig):
    """torch.cuda.memory's history, of one role."""

    trace_alloc_max_entries: int = 100000
    stack_depth: int = 32


@dataclass
class PrecisionDebuggerToolConfig(BaseConfig):
    """msprobe."""

    config_path: str | None = None
    steps: list[int] | None = None
    stages: list[str] | None = None
    strict: bool = False


@dataclass
class ProfilerToolsConfig(BaseConfig):
    """Options of each tool, of one role."""

    nsys: NsightToolConfig = field(default_factory=NsightToolConfig)
    npu: NPUToolConfig = field(default_factory=NPUToolConfig)
    torch: TorchProfilerToolConfig = field(default_factory=TorchProfilerToolConfig)
    torch_memory: TorchMemoryToolConfig = field(default_factory=TorchMemoryToolConfig)
    precision_debugger: PrecisionDebuggerToolConfig = field(default_factory=PrecisionDebuggerToolConfig)


@dataclass
class ProfilerConfig(BaseConfig):
    """The profiler of one role."""

    tool: str | None = None
    enable: bool = False
    all_ranks: bool = False
    ranks: list[int] = field(default_factory=list)
    save_path: str | None = SAVE_PATH
    tool_config: ProfilerToolsConfig = field(default_factory=ProfilerToolsConfig)


@dataclass
class RolloutNPUToolConfig(NPUToolConfig):
    """Ascend's profiler, of the rollout; both limits count tokens."""

    profile_token_start: int | None = None
    profile_token_end: int | None = None


@dataclass
class RolloutTorchToolConfig(BaseConfig):
    """torch.profiler, of the rollout; both limits count tokens."""

    contents: list[str] = field(default_factory=list)
    discrete: bool = False
    profile_token_start: int | None = None
    profile_token_end: int | None = None


@dataclass
class RolloutProfilerToolsConfig(BaseConfig):
    """Options of each tool, of the rollout."""

    npu: RolloutNPUToolConfig = field(default_factory=RolloutNPUToolConfig)
    torch: RolloutTorchToolConfig = field(default_factory=RolloutTorchToolConfig)
    precision_debugger: PrecisionDebuggerToolConfig = field(default_factory=PrecisionDebuggerToolConfig)


@dataclass
class RolloutProfilerConfig(BaseConfig):
    """The profiler of the rollout."""

    tool: str | None = None
    enable: bool = False
    all_ranks: bool = False
    ranks: list[int] = field(default_factory=list)
    save_path: str | None = SAVE_PATH
    tool_config: RolloutProfilerToolsConfig = field(default_factory=RolloutProfilerToolsConfig)


def _controller_options() -> dict[str, Any]:
    return {"trace": "cuda,nvtx,cublas,ucx", "cuda-memory-usage": "true", "cuda-graph-trace": "graph"}


def _worker_options() -> dict[str, Any]:
    return {
        **_controller_options(),
        "capture-range": "cudaProfilerApi",
        "capture-range-end": None,
        "kill": "none",
    }


@dataclass
class GlobalNsightConfig(BaseConfig):
    """Nsight Systems, of the run."""

    discrete: bool = False
    controller_nsight_options: dict[str, Any] = field(default_factory=_controller_options)
    worker_nsight_options: dict[str, Any] = field(default_factory=_worker_options)


@dataclass
class GlobalTorchMemoryConfig(TorchMemoryToolConfig):
    """torch.cuda.memory's history, of the run."""

    context: str = "all"
    stacks: str = "all"
    kw_args: dict[str, Any] = field(default_factory=dict)


@dataclass
class GlobalToolsConfig(BaseConfig):
    """Options of each tool, of the run."""

    nsys: GlobalNsightConfig = field(default_factory=GlobalNsightConfig)
    torch_memory: GlobalTorchMemoryConfig = field(default_factory=GlobalTorchMemoryConfig)
    precision_debugger: PrecisionDebuggerToolConfig = field(default_factory=PrecisionDebuggerToolConfig)


@dataclass
class GlobalProfilerConfig(BaseConfig):
    """`global_profiler`: which tool, in which steps."""

    tool: str | None = None
    steps: list[int] | None = None
    profile_continuous_steps: bool = False
    save_path: str = SAVE_PATH
    global_tool_config: GlobalToolsConfig = field(default_factory=GlobalToolsConfig)
