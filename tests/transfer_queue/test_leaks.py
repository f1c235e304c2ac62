"""Two hundred steps of a run leave nothing behind: no row, no block, no shared memory, no mapping, no open file."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import rlflow.transfer_queue as tq
from rlflow.utils.ray_utils import ray_get

pytestmark = pytest.mark.alone

STEPS = 200
SETTLED = 40  # steps after which pools and allocators have their size
ROWS = 32


def own_handles() -> dict[str, int]:
    """Open files and mappings of this process."""
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "mappings": len(
            [
                line
                for line in Path("/proc/self/maps").read_text().splitlines()
                if "/memfd:" in line or "/dev/shm" in line
            ]
        ),
    }


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))


def step(number: int) -> None:
    """Prompts as tags, trajectories with tensors and text, a field added later, everything read and cleared."""
    keys = [f"{number}_{row}" for row in range(ROWS)]
    lengths = torch.arange(ROWS) * 7 + 1 + number % 3
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = torch.nested.nested_tensor_from_jagged(torch.full((int(offsets[-1]),), number), offsets)
    text = NonTensorStack(*(f"answer {key}" for key in keys))
    tq.kv_batch_put(keys, "train", tags=[{"status": "running"}] * ROWS)
    rows = TensorDict({"tokens": tokens, "big": torch.full((ROWS, 2000), number), "text": text}, batch_size=[ROWS])
    tq.kv_batch_put(keys, "train", rows, [{"status": "finished"}] * ROWS)
    tq.kv_batch_put(keys, "train", TensorDict({"adv": torch.full((ROWS,), float(number))}, batch_size=[ROWS]))
    got = tq.kv_batch_get(keys, "train")
    assert int(got["big"].values()[-1]) == number == int(got["adv"][0])
    tq.kv_clear(keys, "train")


def look() -> dict[str, int]:
    """How many handles the process has that looks on."""
    tq.kv_list("train")
    return own_handles()


def read(number: int) -> None:
    """Another process puts, reads and keeps a view for a while."""
    keys = [f"other{number}_{row}" for row in range(4)]
    tq.kv_batch_put(keys, "train", TensorDict({"x": torch.full((4, 9000), number)}, batch_size=[4]))
    assert int(tq.kv_batch_get(keys, "train")["x"].values()[0]) == number
    tq.kv_clear(keys, "train")


def held() -> dict[str, Any]:
    stats = asyncio.run(tq.get_client().async_stats())
    return {
        "rows": sum(stats["rows"].values()),
        "blocks": sum(unit["blocks"] for unit in stats["units"]),
        "bytes": sum(unit["bytes"] for unit in stats["units"]),
    }


def test_two_hundred_steps_leave_nothing_behind(table_processes, processes):
    tq.close()
    tq.init({"backend": {"SimpleStorage": {"shared_memory_idle_seconds": 2.0}}})
    other, units = processes[0], table_processes.units()
    controller = table_processes.pid_of(*table_processes.actors("TransferQueueController"))

    def handles() -> list[dict[str, int]]:
        return [own_handles(), ray_get(other.run.remote(look), what="the other process", timeout_s=60)]

    for number in range(STEPS):
        step(number)
        if number % 5 == 0:
            ray_get(other.run.remote(read, number), what="the other process", timeout_s=60)
        if number == SETTLED:
            assert held() == {"rows": 0, "blocks": 0, "bytes": 0}
            before, private = handles(), private_bytes(controller)
    assert held() == {"rows": 0, "blocks": 0, "bytes": 0}
    for old, new in zip(before, handles(), strict=True):
        assert new["files"] <= old["files"] + 2, "a step leaves files open"
        assert new["mappings"] <= old["mappings"] + 4, "a step leaves memory mapped"
    # The log of deletions may hold a few hundred bytes a key.
    assert private_bytes(controller) <= private + (8 << 20)

    # A writer keeps a segment for its next put, until it has put nothing for a while.
    deadline = time.monotonic() + 20
    while table_processes.memory_files(units):
        assert time.monotonic() < deadline, "memory of an idle table is given back"
        time.sleep(0.1)
    tq.close()
