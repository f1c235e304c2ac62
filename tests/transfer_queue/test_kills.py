"""A process of the table is killed (SIGKILL): what the others notice, how soon, and what remains."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from tensordict import TensorDict

import rlflow.transfer_queue as tq
from rlflow.utils.ray_utils import ray_get

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
SOON_S = 15.0  # within this every caller has its error


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(true: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Wait until a condition holds that nothing tells of, as it is about processes and files."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.05)


def kill(pid: int) -> None:
    """SIGKILL, and the end of it: until then the process and its memory can still be seen."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid), f"process {pid} ends")


def others_with(inodes: Iterable[int]) -> set[int]:
    """Processes but this one that have one of these files open or mapped."""
    wanted, found = set(inodes), set()
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError):
            if pid != os.getpid() and any(os.stat(path).st_ino in wanted for path in (folder / "fd").iterdir()):
                found.add(pid)
    return found


def rows_of(number: int) -> TensorDict:
    """Rows of 2 MB, so that a few of them lie in different storage units."""
    return TensorDict({"x": torch.full((4, 60_000), number), "n": torch.tensor([number] * 4)}, batch_size=[4])


def put_batches(first: int, count: int) -> None:
    for number in range(first, first + count):
        keys = [f"{number}_{row}" for row in range(4)]
        tq.kv_batch_put(keys, "train", rows_of(number), [{"status": "finished"}] * 4)


def attach() -> None:
    """Forget a table of an earlier test, and know all units of this one."""
    tq.close()
    put_batches(1, 1)


def unit_blocks() -> list[int]:
    """Blocks of each storage unit."""
    return [unit["blocks"] for unit in asyncio.run(tq.get_client().async_stats())["units"]]


# -- a storage unit ----------------------------------------------------------------------------------------------------


def test_a_killed_storage_unit_takes_its_rows_and_no_others(ray_table, processes, table_processes):
    put_batches(0, 6)
    for i, process in enumerate(processes, 1):
        ray_get(process.run.remote(put_batches, 10 * i, 6), what="puts", timeout_s=60)
    numbers = [*range(6), *range(10, 16), *range(20, 26)]
    blocks = unit_blocks()
    victim = max(range(3), key=lambda unit: blocks[unit])
    assert 0 < blocks[victim] < sum(blocks), blocks
    version, _ = tq.kv_watch("train")

    kill(table_processes.units()[victim])
    lost, kept = [], []
    for number in numbers:
        keys = [f"{number}_{row}" for row in range(4)]
        start = time.monotonic()
        try:
            assert tq.kv_batch_get(keys, "train")["n"].tolist() == [number] * 4
            kept.append(number)
        except tq.StorageUnitLostError as error:
            assert "unit" in str(error) and f"{number}_0" in str(error)
            lost.append(number)
        assert time.monotonic() - start < SOON_S
    assert (len(lost), len(kept)) == (blocks[victim], sum(blocks) - blocks[victim])

    # The rows are reported, to watchers and in the list; their tags are still there.
    _, changes = tq.kv_watch("train", version, SOON_S)
    assert changes.keys() == {f"{number}_{row}" for number in lost for row in range(4)}
    for tag in changes.values():
        assert tag == {"status": "finished", "tq_lost": ["n", "x"]}

    # Putting the fields again mends a row, clearing it forgets it, and new puts find a living unit.
    put_batches(lost[0], 1)
    assert tq.kv_list("train")["train"][f"{lost[0]}_0"] == {"status": "finished"}
    assert tq.kv_batch_get(f"{lost[0]}_0", "train")["n"].tolist() == [lost[0]]
    tq.kv_clear([f"{number}_{row}" for number in lost for row in range(4)], "train")
    put_batches(100, 6)
    assert tq.kv_batch_get("105_3", "train")["n"].tolist() == [105]


def test_a_new_unit_takes_the_place_of_a_dead_one(ray_table, processes, table_processes):
    tq.close()
    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1, "replacement_units": 1}}})
    put_batches(0, 1)
    for process in processes:
        ray_get(process.run.remote(attach), what="a process to attach", timeout_s=60)
    (first,) = table_processes.units()
    kill(first)
    # A process that knows the dead unit only finds the new one, to write and to read.
    writer, reader = processes
    ray_get(writer.run.remote(put_batches, 2, 1), what="a put", timeout_s=60)
    assert ray_get(reader.run.remote(tq.kv_batch_get, "2_1", "train"), what="a get", timeout_s=60)["n"].tolist() == [2]
    with pytest.raises(tq.StorageUnitLostError):
        tq.kv_batch_get("0_0", "train")
    put_batches(0, 1)
    assert tq.kv_batch_get("0_3", "train")["x"].values().eq(0).all()
    assert unit_blocks() == [0, 2]
    (second,) = set(table_processes.units()) - {first}
    kill(second)
    with pytest.raises(tq.QueueUnavailableError, match="all 2 storage units"):
        put_batches(3, 1)


def test_without_any_unit_puts_are_refused_and_tags_live_on(ray_table, table_processes):
    tq.close()
    units = {"num_data_storage_units": 3, "exact_unit_count": True, "replacement_units": 0}
    tq.init({"backend": {"SimpleStorage": units}})
    put_batches(0, 3)
    for pid in table_processes.units():
        kill(pid)
    start = time.monotonic()
    with pytest.raises(tq.StorageUnitLostError):
        tq.kv_batch_get("0_0", "train")
    with pytest.raises(tq.QueueUnavailableError, match="unit"):
        put_batches(1, 3)
    assert time.monotonic() - start < 2 * SOON_S
    tq.kv_put("0_0", "train", tag={"seen": True})
    assert tq.kv_list("train")["train"]["0_0"]["seen"] is True


# -- the controller ----------------------------------------------------------------------------------------------------


def waits() -> list[Callable[[], Any]]:
    """Calls that wait for long."""
    keys = ["never"]
    return [
        lambda: tq.kv_watch("empty", 0, 120),
        lambda: tq.kv_wait("empty", keys=keys, predicate=tq.Predicate("finished"), timeout_s=120),
        lambda: tq.kv_put("one too many", "train", {"x": torch.ones(1000)}),
    ]


def errors_of_waits() -> list[str]:
    """Names of the errors with which these calls end."""

    def error_of(call: Callable[[], Any]) -> str:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - which one it is, is the question
            return type(error).__name__
        return "none"

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(error_of, waits()))


def test_when_the_controller_is_killed_every_waiting_call_ends(table_processes, processes):
    tq.close()
    units = {"num_data_storage_units": 2, "exact_unit_count": True, "total_storage_size": 1}
    tq.init({"capacity_wait_s": 120.0, "backend": {"SimpleStorage": units}})
    tq.kv_put("a", "train", {"x": torch.ones(1000)})
    units = table_processes.units()
    memory = table_processes.memory_files(units)
    [controller] = table_processes.actors("TransferQueueController")
    with ThreadPoolExecutor(1) as pool:
        here = pool.submit(errors_of_waits)
        there = processes[0].run.remote(errors_of_waits)
        time.sleep(1.0)  # until they sleep in the controller, of which nothing tells from outside
        start = time.monotonic()
        kill(table_processes.pid_of(controller))
        assert here.result(SOON_S) == ["QueueUnavailableError"] * 3
        assert ray_get(there, what="the other process", timeout_s=SOON_S) == ["QueueUnavailableError"] * 3
        assert time.monotonic() - start < SOON_S
    until(lambda: not any(map(alive, units)), "the storage units of a dead controller end")
    tq.close()
    ray_get(processes[0].run.remote(tq.close), what="leaving", timeout_s=30)
    until(lambda: not others_with(memory), "shared memory of the table is given back")


# -- the owner ---------------------------------------------------------------------------------------------------------

OWNER = """
import sys, time, ray, torch, rlflow.transfer_queue as tq
ray.init(address=sys.argv[1], namespace="owner", log_to_driver=False)
units = {"num_data_storage_units": 2, "exact_unit_count": True}
tq.init({"namespace": "short-lived", "backend": {"SimpleStorage": units}})
for number in range(8):
    tq.kv_put(f"k{number}", "train", {"x": torch.ones(500_000)})
print("ready", flush=True)
time.sleep(300)
"""


def test_a_killed_owner_leaves_no_process_and_no_shared_memory(table_processes):
    tq.close()
    address = ray.get_runtime_context().gcs_address
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, address], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    assert owner.stdout.readline() == b"ready\n"
    pids = [table_processes.pid_of(actor) for actor in table_processes.actors("TransferQueue")]
    assert len(pids) == 3
    memory = table_processes.memory_files(pids)
    tq.init({"namespace": "short-lived"})
    held = tq.kv_batch_get("k3", "train")["x"].values()
    owner.kill()
    owner.wait(10)
    with pytest.raises(tq.QueueUnavailableError):
        tq.kv_watch("train", tq.kv_watch("train")[0], 60)
    until(lambda: not any(map(alive, pids)), "controller and units of a dead owner end")
    until(lambda: not others_with(memory), "shared memory of a dead owner is given back")
    assert float(held.sum()) == 500_000, "what a reader holds is its own"
    tq.close()


# -- a client ----------------------------------------------------------------------------------------------------------

CLIENT = """
import itertools, sys, ray, torch, rlflow.transfer_queue as tq
from tensordict import TensorDict
ray.init(address=sys.argv[1], log_to_driver=False)
data = TensorDict({"x": torch.ones(16, 8192)}, batch_size=[16])
for number in itertools.count():
    tq.kv_batch_put([f"{sys.argv[2]}_{number}_{row}" for row in range(16)], "train", data)
    if number == 2:
        print("ready", flush=True)
"""


def test_the_memory_of_a_client_killed_while_it_puts_comes_back(table_processes):
    tq.close()
    tq.init({"backend": {"SimpleStorage": {"shared_memory_idle_seconds": 1.0}}})
    address = ray.get_runtime_context().gcs_address
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", CLIENT, address, str(life)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        for life in range(2)
    ]
    for client in clients:
        assert client.stdout.readline() == b"ready\n"
        client.kill()
        client.wait(10)
    keys = list(tq.kv_list("train")["train"])
    assert len(keys) >= 2 * 3 * 16
    for start in range(0, len(keys), 16):
        assert float(tq.kv_batch_get(keys[start : start + 16], "train")["x"].values().sum()) == 16 * 8192
    tq.kv_clear(keys, "train")
    until(lambda: sum(unit_blocks()) == 0, "blocks of a dead client are freed")
    units = table_processes.units()
    until(lambda: not table_processes.memory_files(units), "its memory is given back")
    tq.close()


# -- the whole table ---------------------------------------------------------------------------------------------------


def test_what_was_read_outlives_the_table(ray_table):
    put_batches(7, 1)
    got = tq.kv_batch_get([f"7_{row}" for row in range(4)], "train")
    tq.close()
    assert torch.equal(got["x"].values().view(4, 60_000), rows_of(7)["x"])
    tq.init()
    put_batches(8, 1)
    assert torch.equal(got["x"].values().view(4, 60_000), rows_of(7)["x"])
