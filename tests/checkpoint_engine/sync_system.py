"""Trainer processes, replicas and a manager: everything of a weight sync but the training."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import rollout_tiny as tiny
import rollout_worker
from omegaconf import OmegaConf

from rlflow.checkpoint_engine.manager import CheckpointEngineManager
from rlflow.utils.ray_utils import ray_get
from rlflow.workers.rollout.hf.replica import HFReplica

GREEDY = {"temperature": 0.0, "logprobs": True, "max_tokens": 6, "ignore_eos": True}


class SyncSystem:
    """`workers` FeedWorkers and as many replicas: hybrid ones with `naive`, else on their own.

    `deadline_s` bounds what may hang in these tests, pause and transfer; starting processes has its usual time.
    """

    def __init__(self, path: str, *, workers: int = 2, deadline_s: float = 20.0, **engine: Any) -> None:
        import ray

        from rlflow.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

        ray.cloudpickle.register_pickle_by_value(rollout_worker)
        self.config = tiny.config(path, load_format="dummy")
        self.node = self.config.actor_rollout_ref.rollout
        for name, value in engine.items():
            self.node.checkpoint_engine[name] = value
        for phase in ("pause", "transfer"):
            self.node.checkpoint_engine[f"{phase}_timeout_s"] = deadline_s
        cls = RayClassWithInitArgs(ray.remote(rollout_worker.FeedWorker), path, self.node)
        self.workers = RayWorkerGroup(RayResourcePool([workers], use_gpu=False), cls, device_name="cpu")
        self.replicas = asyncio.run(self._start(range(workers)))
        if self.hybrid:
            self.workers.bind_rollout([replica.server_handle for replica in self.replicas])
        self.sync = CheckpointEngineManager(self.node.checkpoint_engine, self.workers, self.replicas)

    @property
    def hybrid(self) -> bool:
        return self.node.checkpoint_engine.backend == "naive"

    async def _start(self, ranks: Iterable[int]) -> list[HFReplica]:
        model = self.config.actor_rollout_ref.model
        replicas = [HFReplica(rank, self.node, model, gpus_per_node=1) for rank in ranks]
        starts = [r.init_hybrid(self.workers) if self.hybrid else r.init_standalone() for r in replicas]
        await asyncio.gather(*starts)
        return replicas

    def restart(self, rank: int) -> HFReplica:
        """A new server in the place of a dead one, as a supervisor would do it."""
        old = self.replicas[rank]
        self.sync.remove_replicas([old])
        asyncio.run(old.shutdown())
        self.replicas[rank] = asyncio.run(self._start([rank]))[0]
        if self.hybrid:
            self.workers.bind_rollout([replica.server_handle for replica in self.replicas])
        self.sync.add_replicas([self.replicas[rank]])
        return self.replicas[rank]

    def generate(self, rank: int) -> Any:
        call = self.replicas[rank].server_handle.generate.remote([5, 6], GREEDY, f"r{rank}", 20.0)
        return ray_get(call, what="a generation", timeout_s=40)

    def version(self, rank: int) -> int | None:
        return asyncio.run(self.replicas[rank].weight_version())

    def holds_the_trainers_weights(self, rank: int) -> bool:
        held = ray_get(
            self.replicas[rank].server_handle.__ray_call__.remote(
                lambda server: {name: p.clone() for name, p in server._engine.model.module.named_parameters()}
            ),
            what="the weights",
            timeout_s=60,
        )
        return all((held[name] == value).all() for name, value in self.workers.weights()[0].items())

    def sync_with(self, **config: Any) -> CheckpointEngineManager:
        """Another manager of the same replicas."""
        node = {**self.node.checkpoint_engine, **config}
        return CheckpointEngineManager(OmegaConf.create(node), self.workers, self.replicas)

    def close(self) -> None:
        for replica in self.replicas:
            self.sync.remove_replicas([replica])
            asyncio.run(replica.shutdown())
        self.workers.shutdown()


def shared_memory_files() -> set[str]:
    """Of this test: Ray's own files come and go."""
    return {name for name in os.listdir("/dev/shm") if "rlflow" in name}


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
