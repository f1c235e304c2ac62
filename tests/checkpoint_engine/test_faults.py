"""What may go wrong in a sync to replicas beside the trainer, with real processes: it ends in time and has a name."""

from __future__ import annotations

import os
import signal
import time

import pytest
from sync_system import SyncSystem, shared_memory_files

from rlflow.checkpoint_engine.manager import SyncState
from rlflow.utils.errors import ContractError, WeightSyncError
from rlflow.utils.ray_utils import ray_get

DEADLINE_S = 4.0
LAYER = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def system(ray_cluster, model_path):
    before = shared_memory_files()
    system = SyncSystem(model_path, deadline_s=DEADLINE_S, update_weights_bucket_megabytes=0.05)
    system.sync.update_weights(0)
    yield system
    system.close()
    assert shared_memory_files() == before


def test_metrics_have_the_seconds_of_every_phase(system):
    metrics = system.sync.update_weights(1)
    for phase in ("pause", "prepare", "transfer", "verify", "commit", "resume"):
        assert metrics[f"{phase}_s"] > 0
    assert system.holds_the_trainers_weights(0) and system.holds_the_trainers_weights(1)


def test_flipped_bytes_on_the_way_name_the_tensor(system):
    def flip(server):
        from rlflow.workers.rollout.hf.model import ServedModel

        load = ServedModel.load

        def flipped(self, name, tensor, digest=None):
            if name == "model.layers.0.self_attn.q_proj.weight":
                tensor = tensor.clone()
                tensor[3, 4] += 0.001
            load(self, name, tensor, digest)

        server._engine.model.load = flipped.__get__(server._engine.model)

    def restore(server):
        del server._engine.model.load

    handle = system.replicas[1].server_handle
    ray_get(handle.__ray_call__.remote(flip), what="the fault", timeout_s=30)
    with pytest.raises(WeightSyncError, match="replica 1 in `verify`.*q_proj") as caught:
        system.sync.update_weights(2)
    error = caught.value
    assert (error.phase, error.replicas, error.lost) == ("verify", (1,), False)
    assert error.tensors == ("model.layers.0.self_attn.q_proj.weight",)
    # The other one serves the version, the wrong one refuses by name.
    assert system.generate(0).extra_fields["global_steps"] == 2
    with pytest.raises(ContractError, match="weight update did not finish"):
        system.generate(1)
    ray_get(handle.__ray_call__.remote(restore), what="its end", timeout_s=30)
    system.sync.update_weights(3)
    assert system.generate(1).extra_fields["global_steps"] == 3


def test_the_canary_finds_an_engine_that_does_not_compute_with_what_it_holds(system):
    """Its parameters are those that were sent; what is computed comes from something else."""
    sync = system.sync_with(canary="always")
    assert sync.update_weights(3)["canary_error"] < 1e-4

    def garble(server):
        layer = server._engine.model.module.model.layers[1]
        server.garbled = layer.mlp.register_forward_hook(lambda module, args, output: output * 0.5)

    handle = system.replicas[1].server_handle
    ray_get(handle.__ray_call__.remote(garble), what="the fault", timeout_s=30)
    with pytest.raises(WeightSyncError, match="replica 1 in `verify`.*canary prompt differ") as caught:
        sync.update_weights(4)
    assert caught.value.replicas == (1,)
    assert system.generate(0).extra_fields["global_steps"] == 4
    with pytest.raises(ContractError, match="withdrawn by the trainer"):
        system.generate(1)
    assert sync.state is SyncState.SERVING
    never = system.sync_with(canary="never")
    never.update_weights(5)
    ray_get(handle.__ray_call__.remote(lambda server: server.garbled.remove()), what="its end", timeout_s=30)


def test_a_dropped_tensor_is_named_by_every_replica(system):
    system.workers.change(1, fault=("drop", LAYER))
    with pytest.raises(WeightSyncError, match=f"got no weights in this sync: {LAYER}") as caught:
        system.sync.update_weights(6)
    assert caught.value.replicas == (0, 1) and set(caught.value.tensors) == {LAYER}
    system.workers.change(1)
    system.sync.update_weights(7)


def test_an_exception_between_pause_and_resume_leaves_nobody_waiting(system):
    from rlflow.single_controller.errors import WorkerError

    system.workers.change(2, fault=("raise", LAYER))
    with pytest.raises(WorkerError, match="gathering failed"):
        system.sync.update_weights(8)
    assert system.sync.state is SyncState.SERVING
    with pytest.raises(ContractError, match="weight update did not finish"):
        system.generate(0)
    system.workers.change(2)
    system.sync.update_weights(9)
    assert system.generate(0).extra_fields["global_steps"] == 9


@pytest.mark.parametrize(("what", "words"), [("SIGKILL", "died"), ("SIGSTOP", "did not answer within")])
def test_a_replica_that_dies_or_hangs_while_syncing_is_named_and_the_other_goes_on(system, what, words):
    victim = system.replicas[0].pids[0]
    version = 10 if what == "SIGKILL" else 20
    system.workers.change(3, fault=(what, LAYER), victim=victim)
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=f"replica 0 in `transfer`.*{words}") as caught:
        system.sync.update_weights(version)
    assert time.monotonic() - started < 3 * DEADLINE_S
    assert (caught.value.phase, caught.value.replicas, caught.value.lost) == ("transfer", (0,), True)
    assert system.generate(1).extra_fields["global_steps"] == version
    if what == "SIGSTOP":
        os.kill(victim, signal.SIGKILL)
    # A supervisor starts it again; it gets what the other has, which goes on serving meanwhile.
    system.workers.change(0)  # a zero-seed change: the trainer has newer weights now
    fresh = system.restart(0)
    with pytest.raises(WeightSyncError, match="The trainer has newer weights; wait for the next sync"):
        system.sync.update_weights(version, replicas=[fresh])
    system.sync.update_weights(version + 1)
    assert system.holds_the_trainers_weights(0)


def test_a_replica_that_was_started_again_gets_the_version_of_the_others(system):
    system.sync.update_weights(30)
    fresh = system.restart(1)
    metrics = system.sync.update_weights(30, replicas=[fresh])
    assert metrics["replicas"] == 1 and system.sync.state is SyncState.SERVING
    assert system.generate(1).token_ids == system.generate(0).token_ids
    # Asleep like the others when it comes back while they sleep.
    system.sync.sleep_replicas()
    fresh = system.restart(1)
    system.sync.update_weights(30, replicas=[fresh])
    assert system.sync.state is SyncState.ASLEEP
    status = ray_get(fresh.server_handle.status.remote(), what="its status", timeout_s=20)
    assert status["asleep"] and status["version"] == 30
    system.sync.wake_up_replicas()


def test_a_hung_replica_does_not_hold_up_the_pause(system):
    victim = system.replicas[1].pids[0]
    os.kill(victim, signal.SIGSTOP)
    try:
        with pytest.raises(WeightSyncError, match="replica 1 in `pause`: no answer within 4 s") as caught:
            system.sync.update_weights(40)
    finally:
        os.kill(victim, signal.SIGCONT)
    assert caught.value.lost and caught.value.replicas == (1,)
    assert system.generate(0).extra_fields["global_steps"] == 40
    system.sync.update_weights(41)
    assert system.generate(1).extra_fields["global_steps"] == 41
