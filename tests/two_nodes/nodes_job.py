"""What `test_two_nodes.py` runs in a process of its own: a Ray cluster of two raylets, groups and a run on both.

    python nodes_job.py RESULTS.json RUN_FOLDER OVERRIDE ...

Writes {scenario: "passed" or the traceback}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from rlflow.checkpoint_engine.manager import build_manager
from rlflow.config.checks import validate_config
from rlflow.config.overrides import compose_config
from rlflow.single_controller.base import Dispatch, Worker, register
from rlflow.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from rlflow.trainer.constants_ppo import get_ppo_ray_runtime_env
from rlflow.trainer.ppo import trainer_base
from rlflow.trainer.ppo.trainer_sync import PPOTrainerSync
from rlflow.trainer.task_runner import TaskRunner
from rlflow.utils.ray_utils import ray_get


class Place(Worker):
    """Says where it is, and meets the others."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self) -> dict[str, Any]:
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "rank": self.rank,
            "local_rank": int(os.environ["LOCAL_RANK"]),
            "local_world_size": int(os.environ["LOCAL_WORLD_SIZE"]),
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sum_of_ranks(self) -> int:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        value = torch.tensor(self.rank)
        dist.all_reduce(value)
        dist.destroy_process_group()
        return int(value)


class Watched(PPOTrainerSync):
    """Notes, before it ends, where the processes of the run are and what the replicas hold; then it broadcasts."""

    seen: dict[str, Any] = {}

    def on_init_end(self) -> None:
        # The workers are built for both ways; the run takes the one of hybrid replicas.
        replicas = self.runtime.server_manager.get_replicas()
        self.runtime.checkpoint_manager = build_manager(
            self.config.actor_rollout_ref.rollout, self.runtime.actor_wg, replicas, backend="naive"
        )
        super().on_init_end()

    def on_train_end(self) -> None:
        super().on_train_end()
        self._note()
        self._broadcast()

    def _broadcast(self) -> None:
        replicas = self.runtime.server_manager.get_replicas()
        manager = build_manager(
            self.config.actor_rollout_ref.rollout, self.runtime.actor_wg, replicas, backend="broadcast"
        )
        Watched.seen["broadcast"] = manager.update_weights(7)
        Watched.seen["relays"] = [where(manager._transfer._relays.of(replica)) for replica in replicas]
        Watched.seen["broadcast_versions"] = self._versions()

    def _versions(self) -> list[int]:
        replicas = self.runtime.server_manager.get_replicas()
        return [ray_get(r.server_handle.weight_version.remote(), what="a version", timeout_s=60) for r in replicas]

    def _note(self) -> None:
        manager = self.runtime.server_manager
        Watched.seen = {
            "workers": [where(worker) for worker in self.runtime.actor_wg.workers],
            "replicas": [where(replica.server_handle) for replica in manager.get_replicas()],
            "fed_by": [manager.handles_by_worker().index(replica.server_handle) for replica in manager.get_replicas()],
            "versions": self._versions(),
            "served": [
                ray_get(replica.server_handle.status.remote(), what="a status", timeout_s=60)
                for replica in manager.get_replicas()
            ],
        }


def where(actor: Any) -> str:
    ref = actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
    return ray_get(ref, what="the node of an actor", timeout_s=60)


class Scenarios:
    """Each public method is one; they run in this order."""

    def __init__(self, nodes: list[str], run_folder: Path, overrides: list[str]) -> None:
        self.nodes, self.run_folder, self.overrides = nodes, run_folder, overrides

    def ranks_follow_the_nodes(self) -> None:
        """Counts may differ by node; ranks of one node are neighbours, and local ranks start at 0 on each."""
        pool = RayResourcePool([2, 1], device_name="cpu")
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Place))
        try:
            places = group.where()
            assert [place["rank"] for place in places] == [0, 1, 2]
            assert len({place["node"] for place in places}) == 2, places
            by_node: dict[str, list[int]] = {}
            for place in places:
                by_node.setdefault(place["node"], []).append(place["local_rank"])
                assert place["local_world_size"] == sum(other["node"] == place["node"] for other in places)
            assert sorted(by_node.values()) == [[0], [0, 1]]
            switches = sum(a["node"] != b["node"] for a, b in zip(places, places[1:], strict=False))
            assert switches == 1, "ranks of one node are neighbours"
            # The rendezvous is reachable from the other node.
            assert group.master_address != "127.0.0.1" or {n["NodeManagerAddress"] for n in ray.nodes()} == {
                "127.0.0.1"
            }
            assert group.sum_of_ranks() == [3, 3, 3]
        finally:
            group.shutdown()
            pool.release()

    def a_group_comes_back_to_its_nodes(self) -> None:
        """Sharded checkpoints may lie on local disks: rank i is on the same node after a restart."""
        seen = []
        for _ in range(2):
            pool = RayResourcePool([1, 1], device_name="cpu")
            group = RayWorkerGroup(pool, RayClassWithInitArgs(Place))
            seen.append([place["node"] for place in group.where()])
            group.shutdown()
            pool.release()
        assert seen[0] == seen[1] and len(set(seen[0])) == 2, seen

    def the_main_job_trains(self) -> None:
        trainer_base.get_trainer_cls("sync")
        trainer_base._TRAINERS["sync"] = Watched
        config = compose_config(self.overrides)
        validate_config(config)
        config.actor_rollout_ref.rollout.checkpoint_engine.backend = "broadcast"
        assert TaskRunner().run(config) == {"global_steps": 2}

    def each_replica_is_beside_the_worker_that_feeds_it(self) -> None:
        seen = Watched.seen
        assert sorted(seen["workers"]) == sorted(self.nodes)
        assert seen["fed_by"] == [0, 1]
        assert seen["replicas"] == seen["workers"]

    def both_replicas_got_the_last_weights_and_worked(self) -> None:
        assert Watched.seen["versions"] == [2, 2]
        assert all(status["decode_tokens"] > 0 for status in Watched.seen["served"]), Watched.seen["served"]

    def a_broadcast_reaches_both_nodes(self) -> None:
        """A receiver beside each replica; what they hold afterwards is what rank 0 sent."""
        seen = Watched.seen
        assert seen["relays"] == seen["replicas"] and len(set(seen["relays"])) == 2
        assert seen["broadcast_versions"] == [7, 7]
        assert seen["broadcast"]["replicas"] == 2

    def every_prompt_was_trained_once(self) -> None:
        lines = (self.run_folder / "events.jsonl").read_text().splitlines()
        trained = [event["uids"] for event in map(json.loads, lines) if event["event"] == "trained"]
        uids = [uid for step in trained for uid in step]
        assert len(trained) == 2 and len(uids) == len(set(uids)) == 4


def outcome(function: Callable[[], None]) -> str:
    try:
        function()
    except Exception:  # noqa: BLE001 - the test shows it
        return traceback.format_exc()
    return "passed"


def main() -> None:
    results, run_folder, *overrides = sys.argv[1:]
    cluster = Cluster()
    try:
        args = {"num_cpus": 8, "object_store_memory": 100 << 20, "include_dashboard": False}
        cluster.add_node(**args)
        # A smaller one: everything that a run asks for would fit on the other.
        cluster.add_node(num_cpus=2, object_store_memory=args["object_store_memory"])
        cluster.wait_for_nodes(timeout=60)
        ray.init(
            address=cluster.address,
            namespace="two-nodes",
            log_to_driver=False,
            runtime_env=get_ppo_ray_runtime_env(compose_config(overrides)),
        )
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        assert len(nodes) == 2
        scenarios = Scenarios(nodes, Path(run_folder), overrides)
        names = [name for name in vars(Scenarios) if not name.startswith("_")]
        Path(results).write_text(json.dumps({name: outcome(getattr(scenarios, name)) for name in names}))
        ray.shutdown()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
