"""The state machine, with replicas and workers whose steps can be watched and made to fail.

They are no stand-ins of our classes but other implementations of the two protocols the manager works with; the real
ones run in tests/rollout/test_system.py.
"""

from __future__ import annotations

import asyncio

import pytest
from omegaconf import OmegaConf

from rlflow.checkpoint_engine.base import WeightReceipt
from rlflow.checkpoint_engine.manager import CheckpointEngineManager, SyncState, build_manager
from rlflow.utils.errors import ConfigError, ContractError, WeightSyncError


class RecordingReplica:
    world_size = 1

    def __init__(self, rank, log):
        self.replica_rank, self.log, self.version = rank, log, None
        self.fail_on = None

    def __getattr__(self, method):
        async def call(*args):
            self.log.append((method, self.replica_rank))
            if self.fail_on == method:
                raise RuntimeError(f"{method} failed")

        return call

    async def weight_version(self):
        return self.version


class RecordingWorkers:
    def __init__(self, replicas, log):
        self.replicas, self.log = replicas, log
        self.receipts = lambda v: [WeightReceipt(v, 3, 30, 7, holder=f"replica {r.replica_rank}") for r in replicas]

    def update_weights(self, global_steps, mode):
        self.log.append(("update_weights", mode))
        for replica in self.replicas:
            replica.version = global_steps
        return [*self.receipts(global_steps), None]


@pytest.fixture
def parts():
    log = []
    replicas = [RecordingReplica(i, log) for i in range(2)]
    workers = RecordingWorkers(replicas, log)
    return CheckpointEngineManager({"backend": "naive"} | Config(), workers, replicas), workers, replicas, log


class Config(dict):
    backend = "naive"

    def __ror__(self, other):
        self.update(other)
        return self


def steps(log):
    return list(dict.fromkeys(name for name, _ in log))


def test_serving_replicas_are_paused_updated_and_resumed(parts):
    manager, _, _, log = parts
    metrics = manager.update_weights(4)
    assert steps(log) == ["abort_all_requests", "update_weights", "wake_up", "resume_generation"]
    assert metrics["version"] == 4 and metrics["bytes"] == 30 and metrics["tensor_count"] == 3
    assert manager.state is SyncState.SERVING


def test_sleeping_replicas_are_woken_after_the_update(parts):
    manager, _, _, log = parts
    manager.sleep_replicas()
    assert manager.state is SyncState.ASLEEP
    manager.update_weights(4)
    assert steps(log) == ["sleep", "update_weights", "wake_up", "resume_generation"]


def test_it_works_inside_a_coroutine_too(parts):
    manager, _, _, _ = parts

    async def run():
        await manager.abort_replicas()
        assert manager.state is SyncState.PAUSED
        return await manager.update_weights(1)

    assert asyncio.run(run())["version"] == 1


def test_generation_is_resumed_whatever_happens(parts):
    manager, workers, _, log = parts

    def broken(version):
        raise RuntimeError("the gather failed")

    workers.receipts = broken
    with pytest.raises(RuntimeError, match="the gather failed"):
        manager.update_weights(4)
    assert steps(log)[-2:] == ["wake_up", "resume_generation"]
    assert manager.state is SyncState.SERVING


def test_the_first_error_is_reported_when_resuming_fails_as_well(parts):
    manager, workers, replicas, _ = parts
    replicas[0].fail_on = "resume_generation"
    workers.receipts = lambda version: [None]
    with pytest.raises(WeightSyncError, match="replica 0 in `transfer`: trainer rank 0 has no server"):
        manager.update_weights(4)
    assert manager.state is SyncState.UNKNOWN


def test_a_failure_names_the_replica_and_the_others_are_still_called(parts):
    manager, _, replicas, log = parts
    replicas[0].fail_on = "sleep"
    with pytest.raises(RuntimeError, match="sleep failed") as caught:
        manager.sleep_replicas()
    assert "rollout replica 0" in caught.value.__notes__[0]
    assert ("sleep", 1) in log and manager.state is SyncState.UNKNOWN


def test_replicas_that_disagree_stop_the_run(parts):
    manager, workers, _, _ = parts
    workers.receipts = lambda v: [WeightReceipt(v, 3, 30, 7), WeightReceipt(v, 3, 30, 8, holder="Rollout replica 1")]
    with pytest.raises(WeightSyncError, match="Rollout replica 1 does not hold.*0007, got.*0008"):
        manager.update_weights(4)


def test_a_replica_with_another_version_stops_the_run(parts):
    manager, workers, replicas, _ = parts

    def forget(version):
        replicas[1].version = 3
        return [WeightReceipt(version, 3, 30, 7)] * 2

    workers.receipts = forget
    with pytest.raises(WeightSyncError, match="replica 1 reports weight version 3; expected 4"):
        manager.update_weights(4)


def test_replicas_come_and_go(parts):
    manager, workers, replicas, log = parts
    with pytest.raises(ContractError, match="managed already"):
        manager.add_replicas(replicas)
    manager.remove_replicas(replicas[1:])
    workers.receipts = lambda v: [WeightReceipt(v, 3, 30, 7)]
    assert manager.update_weights(1)["replicas"] == 1
    assert ("wake_up", 1) not in log


def test_an_unknown_backend_is_refused_by_name():
    class Other(dict):
        backend = "carrier_pigeon"

    with pytest.raises(ConfigError, match="carrier_pigeon is not registered. Known: broadcast, disk, naive, nccl"):
        CheckpointEngineManager(Other(), None, [])


def test_a_manager_of_ones_own_gets_three_arguments_and_the_forced_backend(tmp_path, monkeypatch):
    (tmp_path / "my_manager.py").write_text(
        "from rlflow.checkpoint_engine.manager import CheckpointEngineManager\n"
        "class Mine(CheckpointEngineManager):\n"
        "    def __init__(self, config, actor_wg, replicas):\n"
        "        super().__init__(config, actor_wg, replicas)\n"
        "        self.backend = config.backend\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = OmegaConf.create(
        {"checkpoint_manager_class": "my_manager.Mine", "checkpoint_engine": {"backend": "broadcast"}}
    )
    manager = build_manager(config, None, [], backend="naive")
    assert (type(manager).__name__, manager.backend) == ("Mine", "naive")
    assert config.checkpoint_engine.backend == "broadcast"
