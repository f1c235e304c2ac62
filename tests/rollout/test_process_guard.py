"""Nothing that a server started outlives it, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

# Starts the guard, then a child with a child of its own, and says who they are.
SERVER = """
import subprocess, sys, time
from rlflow.workers.rollout.process_guard import kill_marked, marked, start_guard
mark = start_guard()
child = subprocess.Popen([sys.executable, "-c", '''
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid, flush=True)
time.sleep(600)
'''], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline().strip(), flush=True)
if sys.argv[1:] == ["shutdown"]:
    print(len(kill_marked(mark)), len(marked(mark)), flush=True)
time.sleep(600)
"""


@pytest.fixture
def server():
    started = []

    def start(*args: str) -> tuple[subprocess.Popen, list[int]]:
        process = subprocess.Popen([sys.executable, "-c", SERVER, *args], stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process, [int(pid) for pid in process.stdout.readline().split()]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(pids: list[int], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{[pid for pid in pids if alive(pid)]} outlived their server"
        time.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_descendants_end_with_a_server_that_was_killed(server, how):
    process, pids = server()
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    os.kill(process.pid, how)
    process.wait()
    wait_for_end(pids)


def test_descendants_of_a_stopped_server_end_when_it_is_killed(server):
    process, pids = server()
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for_end(pids)


def test_a_shutdown_ends_them_at_once_and_spares_the_server(server):
    process, pids = server("shutdown")
    killed, _ = process.stdout.readline().split()
    assert int(killed) >= 2
    wait_for_end(pids)
    assert process.poll() is None
