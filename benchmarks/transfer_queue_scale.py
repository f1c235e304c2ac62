"""The scale run of `transfer_queue.py`: 64 clients put, await, read and clear a million rows.

    4 processes x 16 tasks. Client c puts its batch k, awaits batch k of client c + 17 (in another process), reads it,
    checks every byte of it, clears it; then k + 1. All rows lie in one partition.

Rows hold jagged tokens, a scalar and, every eighth batch, text; their content follows from the names of client, batch
and row, so the reader knows what must come back. At the end nothing may be left: no row, no block, and no more memory
than after a short run of the same kind (which fills allocators and pools), give or take `SLACK_BYTES`. Unused shared
memory goes back after `IDLE_S` here, after a minute by default.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from transfer_queue_report import say

PROCESSES = 4
TASKS = 16
CLIENTS = PROCESSES * TASKS
BATCH_ROWS = 125
NEIGHBOUR = 17  # not a multiple of TASKS: the rows of a client are read in another process
PARTITION = "scale"
# What may remain: the controller remembers 200 000 deleted keys; of shared memory a segment may still be lent.
SLACK_BYTES = {"controller and units": 96 << 20, "shared": 8 << 20}
IDLE_S = 5.0
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, not written
_DEADLINE_S = 360.0

T = TypeVar("T")


def batch_of(client: int, number: int) -> tuple[list[str], Any]:
    """Keys and TensorDict of a batch."""
    import torch
    from tensordict import NonTensorStack, TensorDict

    keys = [f"c{client}_b{number}_{row}" for row in range(BATCH_ROWS)]
    lengths = torch.arange(BATCH_ROWS) % 32 + 1
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    first = (client * 1_000_003 + number) * 4096
    fields = {
        "tokens": torch.nested.nested_tensor_from_jagged(torch.arange(first, first + int(offsets[-1])), offsets),
        "score": torch.arange(BATCH_ROWS, dtype=torch.float32) + first % 1009,
    }
    if number % 8 == 0:
        fields["text"] = NonTensorStack(*(f"answer {key}" for key in keys))
    return keys, TensorDict(fields, batch_size=[BATCH_ROWS])


def check(got: Any, want: Any) -> None:
    """AssertionError unless the batches are equal."""
    import torch

    for name in want.keys():
        mine, other = want.get(name), got.get(name)
        if name == "text":
            same = mine.tolist() == other.tolist()
        elif mine.is_nested:
            same = torch.equal(mine.values(), other.values()) and torch.equal(mine.offsets(), other.offsets())
        else:
            same = torch.equal(mine, other)
        if not same:
            raise AssertionError(f"{name} of a batch came back changed")


class ClientProcess:
    """One process of clients (a Ray actor with an event loop)."""

    async def run(self, process: int, first: int, last: int) -> dict[str, list[float]]:
        """Batches `first` to `last` of all clients of this process; {call: seconds of each}."""
        self._took: dict[str, list[float]] = defaultdict(list)
        await asyncio.gather(*(self._client(process * TASKS + i, first, last) for i in range(TASKS)))
        return dict(self._took)

    async def _timed(self, name: str, call: Awaitable[T]) -> T:
        start = time.perf_counter()
        result = await call
        self._took[name].append(time.perf_counter() - start)
        return result

    async def _client(self, client: int, first: int, last: int) -> None:
        import rlflow.transfer_queue as tq

        other = (client + NEIGHBOUR) % CLIENTS
        done = tq.Predicate("finished")
        for number in range(first, last):
            keys, data = batch_of(client, number)
            tags = [{"status": "finished", "n": row} for row in range(BATCH_ROWS)]
            await self._timed("put", tq.async_kv_batch_put(keys, PARTITION, fields=data, tags=tags))
            keys, data = batch_of(other, number)
            wait = tq.async_kv_wait(PARTITION, keys=keys, predicate=done, timeout_s=_DEADLINE_S)
            _, found = await self._timed("wait", wait)
            if len(found) != BATCH_ROWS or found[keys[-1]]["n"] != BATCH_ROWS - 1:
                raise AssertionError(f"the tags of batch {number} of client {other} are not what was put")
            got = await self._timed("get", tq.async_kv_batch_get(keys, PARTITION))
            check(got, data)
            del got
            await self._timed("clear", tq.async_kv_clear(keys, PARTITION))


def private_bytes(pid: int) -> int:
    """Resident size of a process without shared pages."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) * 1024
    return 0


def shared_bytes(pids: list[int]) -> int:
    """Memory files that these processes hold open (each counted once), Ray's object store aside."""
    sizes: dict[int, int] = {}
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target, status = os.readlink(path), path.stat()
            except FileNotFoundError:
                continue
            if target.startswith(("/memfd:", SHARED_MEMORY)) and "plasma" not in target:
                sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


class Memory:
    """Private memory of the table's own processes, and shared memory."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids

    def now(self) -> dict[str, int]:
        """Bytes by kind."""
        private = sum(map(private_bytes, self._pids))
        return {"controller and units": private, "shared": shared_bytes(self._pids)}


def table_pids() -> list[int]:
    """Processes of the controller and the storage units: the Ray workers below this process that are no clients."""
    import psutil

    titles = {child.pid: child.name() for child in psutil.Process().children(recursive=True)}
    others = ("ray::ClientPro", "ray::IDLE")  # a title is cut after 15 characters
    return [pid for pid, title in titles.items() if title.startswith("ray::") and not title.startswith(others)]


def scale_run(rows: int, json_path: Path | None) -> int:
    """Run, report; the exit code."""
    import ray

    root = str(Path(__file__).resolve().parents[1])  # the package of this clone, here and in what Ray starts
    sys.path.insert(0, root)
    os.environ["PYTHONPATH"] = root
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
    import rlflow.transfer_queue as tq

    tq.init({"backend": {"SimpleStorage": {"shared_memory_idle_seconds": IDLE_S}}})
    try:
        return _scale_run(ray, tq, rows, json_path)
    finally:
        tq.close()
        ray.shutdown()


def _scale_run(ray: Any, tq: Any, rows: int, json_path: Path | None) -> int:
    def run(first: int, last: int) -> list[dict[str, list[float]]]:
        refs = [process.run.remote(number, first, last) for number, process in enumerate(processes)]
        return ray.get(refs, timeout=2 * _DEADLINE_S)

    processes = [ray.remote(num_cpus=0)(ClientProcess).remote() for _ in range(PROCESSES)]
    batches = rows // (CLIENTS * BATCH_ROWS)
    warm_up = max(1, batches // 10)
    run(0, warm_up)
    memory = Memory(table_pids())
    before = _settled(memory, {"shared": SLACK_BYTES["shared"]})
    limits = {kind: size + SLACK_BYTES[kind] for kind, size in before.items()}
    start = time.perf_counter()
    took = run(warm_up, warm_up + batches)
    seconds = time.perf_counter() - start
    after = _settled(memory, limits)
    left = tq.kv_list(PARTITION).get(PARTITION, {})
    stats = asyncio.run(tq.get_client().async_stats())
    blocks = sum(unit["blocks"] for unit in stats["units"])

    done = batches * CLIENTS * BATCH_ROWS
    say(f"{done} rows through {CLIENTS} clients in {seconds:.1f} s: {done / seconds:.0f} rows/s, every byte checked")
    for name in ("put", "wait", "get", "clear"):
        values = np.concatenate([part[name] for part in took]) * 1e3
        middle, high = np.percentile(values, [50, 99])
        say(f"    {name:<6} {len(values):>6} calls of {BATCH_ROWS} rows: p50 {middle:.1f} ms, p99 {high:.1f} ms")
    for kind, size in before.items():
        say(f"    memory, {kind}: {size / 2**20:.1f} MiB after the warm-up, {after[kind] / 2**20:.1f} MiB at the end")
    say(f"    left behind: {len(left)} rows, {blocks} blocks")
    kept = not left and not blocks and all(after[kind] <= limit for kind, limit in limits.items())
    say(f"{'met   ' if kept else 'MISSED'} nothing lost, nothing left, memory as at the start")
    if json_path:
        record = {"rows": done, "seconds": seconds, "before": before, "after": after, "calls": took}
        json_path.write_text(json.dumps(record))
    return int(not kept)


def _settled(memory: Memory, limits: dict[str, int], timeout_s: float = 8 * IDLE_S) -> dict[str, int]:
    """Memory once it is within the limits, or after `timeout_s`: units return idle memory after a while."""
    deadline = time.monotonic() + timeout_s
    while True:
        after = memory.now()
        if time.monotonic() > deadline or all(after[kind] <= limit for kind, limit in limits.items()):
            return after
        time.sleep(0.5)
