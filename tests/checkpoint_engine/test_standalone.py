"""Replicas on devices of their own: `broadcast` and `disk`, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
import torch
from sync_system import SyncSystem, leftovers

from rlflow.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry, build_engine
from rlflow.checkpoint_engine.disk import DiskCheckpointEngine
from rlflow.utils.errors import ConfigError, ContractError, WeightSyncError
from rlflow.utils.ray_utils import ray_get

DEADLINE_S = 6.0


@pytest.fixture(scope="module")
def broadcast(ray_cluster, model_path):
    # 0.05 MB: tensors larger than a bucket travel in pieces.
    system = SyncSystem(model_path, backend="broadcast", deadline_s=DEADLINE_S, update_weights_bucket_megabytes=0.05)
    yield system
    system.close()


def test_a_broadcast_reaches_all_replicas(broadcast):
    metrics = broadcast.sync.update_weights(1)
    assert (metrics["replicas"], metrics["version"]) == (2, 1) and metrics["buckets"] > 5
    assert broadcast.holds_the_trainers_weights(0) and broadcast.holds_the_trainers_weights(1)
    broadcast.workers.change(1)
    again = broadcast.sync.update_weights(2)
    assert again["prepare_s"] < metrics["prepare_s"], "the group is kept"
    assert broadcast.holds_the_trainers_weights(0) and broadcast.generate(1).extra_fields["global_steps"] == 2


def test_replicas_leave_and_join_a_broadcast(broadcast):
    second = broadcast.replicas[1]
    broadcast.sync.remove_replicas([second])
    assert broadcast.sync.update_weights(3)["replicas"] == 1
    assert broadcast.version(1) == 2
    broadcast.sync.add_replicas([second])
    assert broadcast.sync.update_weights(4)["replicas"] == 2
    assert broadcast.version(1) == 4


def test_a_receiver_that_hangs_ends_the_broadcast_in_time_and_by_name(broadcast):
    relay = broadcast.sync._transfer._relays.of(broadcast.replicas[1])
    pid = ray_get(relay.ping.remote(), what="the relay", timeout_s=20)
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    try:
        with pytest.raises(WeightSyncError, match="replica 1 in `transfer`: it, or its weight receiver, is") as caught:
            broadcast.sync.update_weights(5)
    finally:
        os.kill(pid, signal.SIGKILL)
    assert time.monotonic() - started < 5 * DEADLINE_S
    assert 1 in caught.value.replicas
    broadcast.sync.update_weights(6)
    assert broadcast.version(0) == broadcast.version(1) == 6


def test_a_receiver_that_died_idle_costs_one_sync(broadcast):
    kill_receiver(broadcast, 0)
    with pytest.raises(WeightSyncError, match="replica 0 in `transfer`: it, or its weight receiver, is"):
        broadcast.sync.update_weights(6)
    broadcast.sync.update_weights(6)
    kill_receiver(broadcast, 0)
    broadcast.sync._transfer._members = ()  # found out while the group is made anew
    with pytest.raises(WeightSyncError, match="replica 0 in `prepare`: it, or its weight receiver, is"):
        broadcast.sync.update_weights(6)
    broadcast.sync.update_weights(6)
    assert broadcast.version(0) == broadcast.version(1) == 6


def kill_receiver(system, rank):
    relay = system.sync._transfer._relays.of(system.replicas[rank])
    os.kill(ray_get(relay.ping.remote(), what="the relay", timeout_s=20), signal.SIGKILL)
    time.sleep(0.5)


def test_a_server_that_dies_in_a_broadcast_does_not_stop_the_other(broadcast):
    layer = "model.layers.1.mlp.up_proj.weight"
    broadcast.workers.change(2, fault=("SIGKILL", layer), victim=broadcast.replicas[0].pids[0])
    with pytest.raises(WeightSyncError, match="replica 0 in `transfer`.*died") as caught:
        broadcast.sync.update_weights(7)
    assert caught.value.replicas == (0,) and caught.value.lost
    assert broadcast.generate(1).extra_fields["global_steps"] == 7
    broadcast.workers.change(2)
    broadcast.restart(0)
    broadcast.sync.update_weights(8)
    assert broadcast.holds_the_trainers_weights(0)


def test_disk_carries_weights_in_files_that_servers_map(ray_cluster, model_path, tmp_path):
    folder = tmp_path / "weights"
    system = SyncSystem(
        model_path,
        workers=1,
        backend="disk",
        engine_kwargs={"disk": {"folder": str(folder)}},
        update_weights_bucket_megabytes=0.3,
    )
    try:
        folder.mkdir()
        (folder / ".weights-000000000-dead").mkdir()  # of a trainer that was killed while it wrote
        system.sync.update_weights(1)
        assert system.holds_the_trainers_weights(0)
        system.workers.change(1)
        assert system.sync.update_weights(2)["files"] > 1
        assert system.holds_the_trainers_weights(0)
        assert leftovers(folder) == ["weights-000000002"]
        kill_receiver(system, 0)
        with pytest.raises(WeightSyncError, match="replica 0 in `transfer`") as caught:
            system.sync.update_weights(3)
        assert caught.value.lost
        system.sync.update_weights(3)
        assert system.version(0) == 3
    finally:
        system.close()


def named(count=3):
    return [(f"t{i}", torch.full((5, i + 1), float(i), dtype=torch.bfloat16)) for i in range(count)]


def test_a_damaged_file_names_the_tensor(tmp_path):
    engine = DiskCheckpointEngine(10**6, is_master=True, folder=str(tmp_path))
    engine.prepare()
    asyncio.run(engine.send_weights(iter(named()), 3))
    ((metas, path),) = engine.stored_buckets(3)
    with open(path, "r+b") as file:
        file.seek(metas[1].offset)
        file.write(b"\x01")

    async def read():
        return [name async for name, _ in engine.receive_weights(3)]

    with pytest.raises(WeightSyncError, match="other bytes than were sent: t1"):
        asyncio.run(read())
    with pytest.raises(WeightSyncError, match="no weights that can be read"):
        engine.stored_buckets(4)


def test_disk_needs_a_folder():
    with pytest.raises(ConfigError, match="engine_kwargs.disk.folder"):
        CheckpointEngineRegistry.new("disk", bucket_size=1)


def test_names_of_the_registry():
    assert CheckpointEngineRegistry.get("nccl") is CheckpointEngineRegistry.get("broadcast")
    with pytest.raises(KeyError):
        CheckpointEngineRegistry.get("carrier_pigeon")
    with pytest.raises(ValueError, match="carrier_pigeon is not registered"):
        CheckpointEngineRegistry.new("carrier_pigeon")
    naive = CheckpointEngineRegistry.new("naive", bucket_size=1)
    with pytest.raises(ContractError, match="naive has no prepare"):
        naive.prepare()


def test_an_engine_of_ones_own(tmp_path):
    import rollout_tiny as tiny

    module = tmp_path / "my_engine.py"
    module.write_text(
        "from rlflow.checkpoint_engine.base import CheckpointEngineRegistry\n"
        "from rlflow.checkpoint_engine.disk import DiskCheckpointEngine\n"
        "@CheckpointEngineRegistry.register('mine')\n"
        "class Mine(DiskCheckpointEngine): pass\n"
    )
    config = tiny.config("unused").actor_rollout_ref.rollout
    config.checkpoint_engine.update({"backend": "mine", "custom_backend_module": str(module)})
    config.checkpoint_engine.engine_kwargs = {"mine": {"folder": str(tmp_path)}}
    engine = build_engine(config, is_master=True)
    assert isinstance(engine, CheckpointEngine) and type(engine).__name__ == "Mine"
