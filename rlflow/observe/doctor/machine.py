"""Cores, memory, devices, shared memory, limits, ports and folders of this machine."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from rlflow.observe.doctor.findings import Finding
from rlflow.observe.doctor.probe import run_python
from rlflow.utils.device import cpu_cores

GIB = 2**30
# Ray keeps its object store there, and rlflow hands rows over in it.
SHM = Path("/dev/shm")  # noqa: S108 - looked at, not written to
_SHM_LEAST, _SHM_USUAL = GIB // 4, 2 * GIB
_FILES_LEAST, _FILES_USUAL = 1024, 4096
_MEMORY_LEAST = 2 * GIB
_DISK_LEAST, _DISK_USUAL = GIB // 4, 10 * GIB
_DEVICES = (
    "import json, torch\n"
    "n = torch.cuda.device_count() if torch.cuda.is_available() else 0\n"
    "p = [torch.cuda.get_device_properties(i) for i in range(n)]\n"
    "print(json.dumps({'build': torch.version.cuda or torch.version.hip or '', "
    "'gpus': [[d.name, d.total_memory] for d in p]}))"
)


def examine_devices(timeout_s: float) -> list[Finding]:
    """GPUs as torch sees them, asked in a process of its own: a broken driver hangs there."""
    import json

    there = [path.name for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    answer = run_python(_DEVICES, timeout_s)
    if answer.error:
        what = f"torch cannot be asked for devices: {answer.error}"
        return [Finding("devices", "bad", what, "reinstall torch, or look at nvidia-smi")]
    facts = json.loads(answer.output.splitlines()[-1])
    found = [Finding("devices", "ok", f"{name}, {size / GIB:.0f} GiB") for name, size in facts["gpus"]]
    if there and not found:
        build = f"built for CUDA {facts['build']}" if facts["build"] else "built for CPUs only"
        fix = "install a torch built for this driver (nvidia-smi names its CUDA), or set trainer.device=cpu"
        return [Finding("devices", "note", f"{len(there)} GPUs are here, and torch ({build}) sees none", fix)]
    return found or [Finding("devices", "ok", "no GPU: runs take trainer.device=cpu")]


def examine_machine(folder: Path) -> Iterator[Finding]:
    """Everything that can be looked at directly."""
    yield from _cores_and_memory()
    yield from _shared_memory()
    yield from _limits()
    yield from _ports()
    yield from _folders(folder)


def _cores_and_memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    text = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB of memory free"
    fix = "end what holds it; the smallest run takes about 2 GiB" if memory.available < _MEMORY_LEAST else ""
    yield Finding("machine", "ok", f"{cpu_cores()} cores")
    yield Finding("machine", "bad" if fix else "ok", text, fix)


def _shared_memory() -> Iterator[Finding]:
    try:
        usage = shutil.disk_usage(SHM)
    except OSError:
        yield Finding("machine", "note", f"{SHM} is not there: Ray's object store goes to the disk, which is slow")
        return
    text = f"{SHM}: {usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    fix = "in a container: docker run --shm-size=16g; else: mount -o remount,size=16G /dev/shm, or delete what is there"
    state = "bad" if usage.free < _SHM_LEAST else "note" if usage.free < _SHM_USUAL else "ok"
    yield Finding("machine", state, text, "" if state == "ok" else fix)  # type: ignore[arg-type]


def _limits() -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = "bad" if files < _FILES_LEAST else "note" if files < _FILES_USUAL else "ok"
    fix = "" if state == "ok" else "ulimit -n 65536 (in the shell that starts the run)"
    yield Finding("limits", state, f"{_number(files)} open files a process (at most {_number(most)})", fix)  # type: ignore[arg-type]
    processes, most = resource.getrlimit(resource.RLIMIT_NPROC)
    few = processes != resource.RLIM_INFINITY and processes < _FILES_USUAL
    fix = "ulimit -u 65536" if few else ""
    yield Finding("limits", "note" if few else "ok", f"{_number(processes)} processes and threads of this user", fix)


def _ports() -> Iterator[Finding]:
    for host in ("127.0.0.1", socket.gethostname()):
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
                listener.bind((host, 0))
            yield Finding("ports", "ok", f"{host} can be listened on")
        except OSError as error:
            fix = f"add a line '127.0.0.1 {host}' to /etc/hosts" if host != "127.0.0.1" else "allow loopback sockets"
            state = "bad" if host == "127.0.0.1" else "note"
            yield Finding("ports", state, f"{host} cannot be listened on: {error}", fix)  # type: ignore[arg-type]


def _folders(folder: Path) -> Iterator[Finding]:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    wanted = {
        "runs": (folder, "rlflow doctor --folder DIR, and trainer.default_local_dir=DIR"),
        "temporary files and Ray's session": (Path(tempfile.gettempdir()), "export TMPDIR=DIR (a short path)"),
        "models from the hub": (home, "export HF_HOME=DIR"),
    }
    for what, (path, fix) in wanted.items():
        existing = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            state = "note" if what.startswith("models") else "bad"
            yield Finding("folders", state, f"{path} ({what}) cannot be written", fix)  # type: ignore[arg-type]
            continue
        free = shutil.disk_usage(existing).free
        state = "bad" if free < _DISK_LEAST else "note" if free < _DISK_USUAL else "ok"
        text = f"{path} ({what}): {free / GIB:.1f} GiB free"
        yield Finding("folders", state, text, "" if state == "ok" else f"make room, or {fix}")  # type: ignore[arg-type]


def _number(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
