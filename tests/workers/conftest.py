"""A tiny model on disk, and a way to run a job in several processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import parallel_cases
import rank_jobs
import tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    return tiny.save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory) -> str:
    return tiny.save_tiny_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def table_models(tmp_path_factory) -> str:
    """A folder with the models of parallel_cases.py."""
    return parallel_cases.save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def single_process_group():
    """torch.distributed with this process as its only rank."""
    import torch.distributed as dist

    from rlflow.workers.engine.process import ensure_process_group

    started = not dist.is_initialized()
    ensure_process_group()
    yield
    if started:
        dist.destroy_process_group()


@pytest.fixture
def run_ranks(start_ranks):
    """run_ranks(world, job, path=..., **kwargs) -> what rank 0 of a job in rank_jobs.py saved.

    One rank is this process.
    """
    return start_ranks


@pytest.fixture(scope="session")
def start_ranks(tmp_path_factory, single_process_group):
    """`run_ranks` for fixtures of a wider scope."""
    folder = tmp_path_factory.mktemp("ranks")

    def run(world: int, job: str, device: str = "cpu", **kwargs):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        out = folder / f"{job}_{world}_{port}.pt"
        if world == 1:
            getattr(rank_jobs, job)(out=str(out), **kwargs)
            return torch.load(out, weights_only=True)
        script = Path(__file__).parent / "rank_jobs.py"
        env = os.environ | {
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "RLFLOW_DEVICE": device,
        }
        command = [sys.executable, str(script), job, str(out), json.dumps(kwargs)]
        log = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, env=env, **log)
        try:
            text = process.communicate(timeout=240)[0]
        finally:
            process.kill()  # its ranks end with it
        assert process.returncode == 0, text[-6000:]
        return torch.load(out, weights_only=True)

    return run
