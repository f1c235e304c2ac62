"""Whatever ends, nothing waits for ever and nothing is left behind. Real engines."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from sglang_probe import act

from rlflow.utils.ray_utils import ray_get
from rlflow.workers.rollout.base import RolloutError

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def _tree(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def _left(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that still run; one that ended may wait for its parent to take note."""
    deadline = time.monotonic() + timeout_s
    while (left := [p for p in processes if _runs(p)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _generation(server):
    call = server.generate.remote([5, 6, 7], {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}, "r")
    deadline = time.monotonic() + 60
    while not ray_get(server.status.remote(), what="status", timeout_s=60)["running"]:
        assert time.monotonic() < deadline
    return call


def test_a_killed_scheduler_fails_its_requests_by_name_and_a_shutdown_cleans_up(sglang_server):
    server = sglang_server(response_length=200)
    pid = ray_get(server.status.remote(), what="status", timeout_s=60)["pid"]
    tree = _tree(pid)

    async def schedulers(it):
        return it._engine.processes()

    scheduler = act(server, schedulers)[0]
    call = _generation(server)
    os.kill(scheduler, signal.SIGKILL)
    with pytest.raises(RolloutError, match=f"process {scheduler} ended with exit code -9"):
        ray_get(call, what="a failure", timeout_s=20)
    assert "exit code -9" in ray_get(server.status.remote(), what="status", timeout_s=20)["failure"]
    with pytest.raises(RolloutError, match="exit code -9"):
        ray_get(server.generate.remote([5], {"max_tokens": 1}, "later"), what="a refusal", timeout_s=20)
    ray_get(server.shutdown.remote(), what="shutdown", timeout_s=60)
    assert _left(tree, 20) == []


def test_a_killed_server_takes_its_processes_with_it(sglang_server):
    server = sglang_server(response_length=200)
    pid = ray_get(server.status.remote(), what="status", timeout_s=60)["pid"]
    tree = _tree(pid)
    assert len(tree) >= 2
    _generation(server)
    os.kill(pid, signal.SIGKILL)
    assert _left(tree, 20) == []


def test_the_stand_ins_change_no_installed_package():
    """torchvision's CUDA build and sgl_kernel's names can be imported, and the packages are as they were published."""
    code = (
        "import torchvision, sgl_kernel, torch\n"
        "from sgl_kernel.anything import at_all\n"
        "assert not hasattr(torch.ops.sgl_kernel, 'convert_weight_packed')\n"
        "try: at_all()\n"
        "except NotImplementedError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sgl_kernel.anything.at_all needs the sgl_kernel package")
    for package in ("torchvision", "sglang"):
        for file in importlib.metadata.files(package) or ():
            if file.suffix == ".py" and file.hash is not None and (path := file.locate()).exists():
                assert _sha256(path) == file.hash.value, f"{package}: {file} was changed"


def _sha256(path) -> str:
    import base64
    import hashlib

    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
