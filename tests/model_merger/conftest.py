"""Checkpoints of one and of two ranks, written by real engines from tiny models whose weights are known."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlflow.checkpoint import write_manifest, write_tracker

ROOT = Path(__file__).resolve().parents[2]
STEP = 3


def start_ranks(world: int, jobs: list[dict[str, object]]) -> list[subprocess.Popen]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    script = [sys.executable, str(Path(__file__).parent / "rank_job.py"), json.dumps(jobs)]
    return [
        subprocess.Popen(
            script,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "RLFLOW_DEVICE": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory) -> SimpleNamespace:
    """Folders `tied` (Llama) and `untied` (Qwen3), with an odd vocabulary, so that ranks hold unequal shards."""
    root = tmp_path_factory.mktemp("models")
    script = [sys.executable, str(ROOT / "examples" / "models" / "make_tiny.py")]
    for name, options in (("tied", []), ("untied", ["--family", "qwen3", "--untied"])):
        subprocess.run([*script, "--out", str(root / name), *options], check=True, capture_output=True, timeout=120)
    return SimpleNamespace(tied=root / "tied", untied=root / "untied")


@pytest.fixture(scope="session")
def runs(tiny_models, tmp_path_factory) -> dict[tuple[int, str], Path]:
    """(world size, "tied" or "untied") -> a run folder with `global_step_3/actor`.

    The tied ones have a `critic` too, the untied ones the weights that the engine itself exported (`hf_model`).
    """
    root = tmp_path_factory.mktemp("runs")
    folders = {(world, name): root / f"{name}_{world}" for world in (1, 2) for name in ("tied", "untied")}
    processes = []
    for world in (1, 2):
        jobs = []
        for name in ("tied", "untied"):
            step = folders[world, name] / f"global_step_{STEP}"
            jobs += [
                {
                    "role": role,
                    "model": str(getattr(tiny_models, name)),
                    "folder": str(step / role),
                    "contents": ["model", "extra"] if name == "tied" else ["model", "hf_model"],
                }
                for role in (("actor", "critic") if name == "tied" else ("actor",))
            ]
        processes += start_ranks(world, jobs)
    logs = [process.communicate(timeout=240)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(log[-3000:] for log in logs)
    for folder in folders.values():
        write_manifest(folder / f"global_step_{STEP}")
        write_tracker(folder, STEP)
    return folders


@pytest.fixture
def run_copy(runs, tmp_path) -> Path:
    """A run of two ranks (tied) that a test may damage."""
    import shutil

    return Path(shutil.copytree(runs[2, "tied"], tmp_path / "run"))
