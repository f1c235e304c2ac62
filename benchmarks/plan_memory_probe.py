"""Notes how much memory a process of a run takes: a module for `actor_rollout_ref.model.external_lib`.

Each process that loads a model imports it before that, and writes `$RLFLOW_MEMORY_PROBE/{pid}.json` ten times a second:

    {"role": "trainer" | "server" | "", "imports": bytes, "peak": bytes}

`imports` is the resident memory after the imports, `peak` the highest since the process started.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401 - what loading would import

FOLDER = "RLFLOW_MEMORY_PROBE"
INTERVAL_S = 0.1


def status(name: str) -> int:
    """A size of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def role() -> str:
    """What this process does: a server is named so by Ray, and only trainers have a process group."""
    if b"HFServer" in Path("/proc/self/cmdline").read_bytes():
        return "server"
    return "trainer" if dist.is_initialized() else ""


def _watch(imports: int) -> None:
    file = Path(os.environ[FOLDER]) / f"{os.getpid()}.json"
    while True:
        note = {"role": role(), "imports": imports, "peak": status("VmHWM")}
        part = file.with_suffix(".part")
        part.write_text(json.dumps(note), encoding="utf-8")
        part.replace(file)
        time.sleep(INTERVAL_S)


if os.environ.get(FOLDER):
    threading.Thread(target=_watch, args=(status("VmRSS"),), name="memory-probe", daemon=True).start()
