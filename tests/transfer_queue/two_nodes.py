"""What `test_two_nodes.py` runs in a process of its own: a Ray cluster of two raylets, and the table on both.

    python two_nodes.py RESULTS.json

The nodes share this machine, but not, as far as the table is concerned, memory: it goes by Ray's node ids. Writes
{scenario: "passed" or the traceback}.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import NonTensorStack, TensorDict

import rlflow.transfer_queue as tq
from rlflow.utils.ray_utils import ray_get

ROWS = 48
KEYS = [f"k{i}" for i in range(ROWS)]
CONF = {"backend": {"SimpleStorage": {"num_data_storage_units": 4}}}


def batch(number: int) -> TensorDict:
    """Dense, jagged, ragged in the second dimension, and objects."""
    lengths = torch.arange(ROWS) % 11 + 1
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return TensorDict(
        {
            "dense": torch.arange(ROWS * 2000).reshape(ROWS, 2000) + number,
            "jagged": torch.nested.nested_tensor_from_jagged(torch.arange(int(offsets[-1])).float() - number, offsets),
            "scalar": torch.arange(ROWS) * number,
            "object": NonTensorStack(*({"turns": [number] * (i % 4)} for i in range(ROWS))),
        },
        batch_size=[ROWS],
    )


class Process:
    """A process on one of the nodes."""

    def put(self, partition: str, number: int, keys: list[str] = KEYS) -> None:
        tq.kv_batch_put(keys, partition, batch(number), [{"status": "finished"}] * len(keys))

    def check(self, partition: str, number: int, keys: list[str] = KEYS) -> None:
        """Every field, and some rows in another order."""
        got, want = tq.kv_batch_get(keys, partition), batch(number)
        assert torch.equal(got["dense"].values().view(ROWS, 2000), want["dense"])
        assert torch.equal(got["jagged"].values(), want["jagged"].values())
        assert torch.equal(got["jagged"].offsets(), want["jagged"].offsets())
        assert torch.equal(got["scalar"], want["scalar"])
        assert got["object"].tolist() == want["object"].tolist()
        some = tq.kv_batch_get([keys[40], keys[3]], partition, ["dense", "object"])
        assert torch.equal(some["dense"].values().view(2, 2000), want["dense"][[40, 3]])
        assert some["object"].tolist() == [want["object"].tolist()[i] for i in (40, 3)]

    def try_check(self, partition: str, number: int) -> str:
        """ "whole", or the name of the error."""
        try:
            self.check(partition, number)
        except tq.TransferQueueError as error:
            return type(error).__name__
        return "whole"

    def write_into_result(self, partition: str) -> None:
        tq.kv_batch_get(KEYS, partition, "dense")["dense"].values().fill_(-1)

    def mapped(self) -> list[str]:
        """Files in memory that this process maps, by device and inode; Ray's own object store aside."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        lines = [line for line in lines if "/memfd:" in line or ("/dev/shm/" in line and "plasma" not in line)]
        return sorted({" ".join(line.split()[3:5]) for line in lines})

    def wait(self, partition: str, count: int) -> int:
        _, found = tq.kv_wait(partition, predicate=tq.Predicate("finished", count), timeout_s=30)
        return len(found)


def unit_pids() -> dict[str, list[tuple[int, int]]]:
    """{node id: (unit number, pid) of its storage units}."""
    found: dict[str, list[tuple[int, int]]] = {}
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["name"].startswith("TransferQueueStorageUnit#"):
            place = ray.get_actor(**named).__ray_call__.remote(
                lambda _: (ray.get_runtime_context().get_node_id(), os.getpid())
            )
            node, pid = wait_for(place)
            number = int(named["name"].split("#")[1].split("@")[0])
            found.setdefault(node, []).append((number, pid))
    return found


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(ref: Any) -> Any:
    return ray_get(ref, what="a node", timeout_s=60)


class Scenarios:
    """Each public method is one; they run in this order on one table."""

    def __init__(self, nodes: list[str]) -> None:
        self.nodes = nodes
        self.here, self.there = (
            ray.remote(num_cpus=0)(Process)
            .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            .remote()
            for node in nodes
        )

    def units_are_on_both_nodes(self) -> None:
        units = unit_pids()
        assert set(units) == set(self.nodes), units
        assert sum(map(len, units.values())) == 4

    def what_one_node_puts_the_other_reads(self) -> None:
        for number, (writer, reader) in enumerate([(self.here, self.there), (self.there, self.here)], 1):
            wait_for(writer.put.remote(f"p{number}", number))
            wait_for(reader.check.remote(f"p{number}", number))
            wait_for(writer.check.remote(f"p{number}", number))

    def rows_of_both_nodes_in_one_get(self) -> None:
        wait_for(self.here.put.remote("mixed", 5))
        wait_for(self.there.put.remote("half", 5))
        for process in (self.here, self.there):
            wait_for(process.put.remote("mixed", 6))  # an upsert from either node
            wait_for(process.check.remote("mixed", 6))
        odd = KEYS[1::2]
        tq.kv_batch_put(odd, "mixed", TensorDict({"scalar": torch.full((ROWS // 2,), -1)}, batch_size=[ROWS // 2]))
        got = tq.kv_batch_get(KEYS, "mixed", ["scalar", "dense"])
        assert got["scalar"][1::2].eq(-1).all() and torch.equal(got["scalar"][::2], batch(6)["scalar"][::2])

    def nodes_map_no_memory_of_each_other(self) -> None:
        mapped = [set(wait_for(process.mapped.remote())) for process in (self.here, self.there)]
        assert all(mapped), "within a node, memory is shared"
        assert not mapped[0] & mapped[1], mapped

    def writing_into_a_result_stays_on_the_node(self) -> None:
        wait_for(self.there.put.remote("w", 9))
        for process in (self.here, self.there):
            wait_for(process.write_into_result.remote("w"))
        for process in (self.here, self.there):
            wait_for(process.check.remote("w", 9))

    def a_waiter_on_the_other_node_is_woken(self) -> None:
        waiting = self.there.wait.remote("late", ROWS)
        wait_for(self.here.put.remote("late", 1))
        assert wait_for(waiting) == ROWS

    def memory_of_both_nodes_is_freed(self) -> None:
        for partition, tags in tq.kv_list().items():
            if tags:
                tq.kv_clear(list(tags), partition)
        stats = asyncio.run(tq.get_client().async_stats())
        assert [unit["blocks"] for unit in stats["units"]] == [0] * 4, stats

    def a_killed_unit_takes_only_its_rows(self) -> None:
        for i in range(4):
            wait_for(self.here.put.remote(f"here{i}", i))
            wait_for(self.there.put.remote(f"there{i}", i))
        blocks = [unit["blocks"] for unit in asyncio.run(tq.get_client().async_stats())["units"]]
        number, pid = max(unit_pids()[self.nodes[1]], key=lambda unit: blocks[unit[0]])
        assert 0 < blocks[number] < 8, blocks
        os.kill(pid, signal.SIGKILL)
        while is_running(pid):
            time.sleep(0.05)  # until it has ended, its memory can still be read
        states = [wait_for(self.here.try_check.remote(f"{side}{i}", i)) for side in ("here", "there") for i in range(4)]
        assert states.count("StorageUnitLostError") == blocks[number], (states, blocks)
        assert states.count("whole") == 8 - blocks[number], (states, blocks)
        wait_for(self.there.put.remote("after", 3))
        wait_for(self.here.check.remote("after", 3))


def outcome(function: Callable[[], None]) -> str:
    try:
        function()
    except Exception:  # noqa: BLE001 - the test shows it
        return traceback.format_exc()
    return "passed"


def main() -> None:
    cluster = Cluster()
    try:
        args = {"num_cpus": 4, "object_store_memory": 100 << 20, "include_dashboard": False}
        cluster.add_node(**args)
        cluster.add_node(**{key: value for key, value in args.items() if key != "include_dashboard"})
        cluster.wait_for_nodes(timeout=60)
        ray.init(address=cluster.address, namespace="two-nodes", log_to_driver=False)
        here = ray.get_runtime_context().get_node_id()
        others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
        tq.init(CONF)
        scenarios = Scenarios([here, *others])
        names = [name for name in vars(Scenarios) if not name.startswith("_")]
        Path(sys.argv[1]).write_text(json.dumps({name: outcome(getattr(scenarios, name)) for name in names}))
        tq.close()
        ray.shutdown()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
