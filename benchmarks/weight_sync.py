"""Time of a weight sync beside a plain copy of the same bytes, in one run on one machine.

    python benchmarks/weight_sync.py --model ~/models/SmolLM2-135M-Instruct
    python benchmarks/weight_sync.py --model ... --engine vllm        # in the environment of that engine

The trainer's side holds the weights in fp32 and sends bfloat16, so a sync is: cast, copy, checksum; and in the server
copy, cast where it computes in another type, checksum of what the parameters hold. Rounds alternate with the copies,
so that a change in the machine's load hits both; the best round of each counts, the median is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import ray
import torch
from omegaconf import OmegaConf

from rlflow.checkpoint_engine.base import build_engine
from rlflow.checkpoint_engine.manager import CheckpointEngineManager
from rlflow.checkpoint_engine.shared_memory import SharedMemorySender
from rlflow.checkpoint_engine.tally import Tally
from rlflow.checkpoint_engine.wire import WireTypes
from rlflow.config import HFModelConfig, RolloutConfig
from rlflow.workers.rollout.replica import get_rollout_replica_class

GOAL = 3.0


def say(text: str) -> None:
    """One line of the report."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Trainer:
    """A worker group of one rank, in this process: what the manager calls."""

    world_size = 1

    def __init__(self, path: str, config: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.params = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
        self.types = WireTypes.from_config(config)
        self.sender = SharedMemorySender(config, 0, 1)
        self.engine = None if config.checkpoint_engine.backend == "naive" else build_engine(config, is_master=True)
        self.server: Any = None

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their names."""
        return ((name, param.detach()) for name, param in self.params.items())

    def update_weights(self, version: int, mode: str, **_: Any) -> Any:
        """In a thread, because a broadcast blocks and the receivers' calls must go out."""
        return asyncio.to_thread(lambda: asyncio.run(self._send(version, mode)))

    async def _send(self, version: int, mode: str) -> Any:
        if mode == "naive":
            return await self.sender.send(self.export(), self.server, version)
        assert self.engine is not None
        tally = Tally(self.types.cast(self.export()))
        metrics = await self.engine.send_weights(tally, version)
        return replace(tally.receipt(version, "trainer"), metrics=metrics or {})

    def execute_checkpoint_engine(self, methods: list[str], **kwargs: list[Any]) -> Any:
        """The engine's method of the one rank."""
        arguments = {name: values[0] for name, values in kwargs.items()}
        return asyncio.to_thread(getattr(self.engine, methods[0]), **arguments)


def configure(args: argparse.Namespace, backend: str, folder: str) -> Any:
    """The nodes `rollout` and `model`."""
    rollout = RolloutConfig(
        name=args.engine,
        prompt_length=256,
        response_length=256,
        max_num_seqs=16,
        tensor_model_parallel_size=1,
        engine_kwargs={"hf": {"kv_cache_gb": 0.5, "compute_dtype": args.compute_dtype}},
    )
    node = OmegaConf.create(
        {
            "rollout": OmegaConf.to_container(OmegaConf.structured(rollout)),
            "model": OmegaConf.to_container(OmegaConf.structured(HFModelConfig(path=args.model))),
        }
    )
    node.rollout.checkpoint_engine.backend = backend
    node.rollout.checkpoint_engine.engine_kwargs = {"disk": {"folder": folder}}
    return node


class Case:
    """One backend with a replica of its own."""

    def __init__(self, args: argparse.Namespace, backend: str, folder: str) -> None:
        node = configure(args, backend, folder)
        self.backend = backend
        self.trainer = Trainer(args.model, node.rollout)
        self.replica = get_rollout_replica_class(args.engine)(0, node.rollout, node.model, gpus_per_node=1)
        asyncio.run(self.replica.init_standalone())
        self.trainer.server = self.replica.server_handle
        self.manager = CheckpointEngineManager(node.rollout.checkpoint_engine, self.trainer, [self.replica])
        self.rounds: list[dict[str, float]] = []

    def run(self, version: int) -> None:
        """One whole sync, pause to resume."""
        self.rounds.append(self.manager.update_weights(version))

    def close(self) -> None:
        """End the processes."""
        self.manager.remove_replicas([self.replica])
        asyncio.run(self.replica.shutdown())


def memcpy(size: int) -> Callable[[], float]:
    """A copy of that many bytes between two pieces of memory that were touched before; seconds."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8)
    target = torch.empty_like(source).copy_(source)

    def run() -> float:
        started = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started

    return run


def report(case: Case, copies: list[float]) -> dict[str, Any]:
    """Lines of one backend; its figures."""
    seconds = [sync["seconds"] for sync in case.rounds[1:]]
    best = min(case.rounds[1:], key=lambda sync: sync["seconds"])
    ratio = min(seconds) / min(copies)
    phases = " ".join(f"{name[:-2]} {1e3 * best[name]:.0f}" for name in best if name.endswith("_s"))
    say(
        f"{case.backend:10s} best {1e3 * min(seconds):6.0f} ms, median {1e3 * statistics.median(seconds):6.0f} ms, "
        f"{ratio:5.2f} x memcpy   (ms: {phases})"
    )
    return {"backend": case.backend, "best_s": min(seconds), "median_s": statistics.median(seconds), "ratio": ratio}


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", default="hf")
    parser.add_argument("--compute-dtype", default="auto", help="of the hf engine: auto, bfloat16, float32")
    parser.add_argument("--backends", default="naive,broadcast,disk")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="fail when naive misses the goal")
    args = parser.parse_args()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        cases = [Case(args, backend, folder) for backend in args.backends.split(",")]
        for case in cases:
            case.run(0)  # processes, groups and pages come into being
        size = int(cases[0].rounds[0]["bytes"])
        copy, copies = memcpy(size), []
        for version in range(1, args.rounds + 1):
            copies.append(min(copy() for _ in range(3)))
            for case in cases:
                case.run(version)
        say(f"{args.engine}, {size / 1e6:.0f} MB, {os.environ['OMP_NUM_THREADS']} threads, {args.rounds} rounds")
        say(f"{'memcpy':10s} best {1e3 * min(copies):6.0f} ms, median {1e3 * statistics.median(copies):6.0f} ms")
        figures = [report(case, copies) for case in cases]
        for case in cases:
            case.close()
    ray.shutdown()
    if args.json:
        args.json.write_text(json.dumps({"bytes": size, "memcpy_s": min(copies), "cases": figures}, indent=2) + "\n")
    if args.check and figures[0]["ratio"] > GOAL:
        raise SystemExit(f"{figures[0]['backend']}: {figures[0]['ratio']:.2f} x memcpy, the goal is {GOAL} x")


if __name__ == "__main__":
    main()
