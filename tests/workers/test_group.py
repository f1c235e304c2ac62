"""Two worker processes under real Ray, rows in the queue: one training step from the controller's side."""

from __future__ import annotations

import pytest
import tiny
import torch
from test_engine_workers import worker_config

import rlflow.transfer_queue as tq
from rlflow.transfer_queue import KVBatchMeta
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.ray_utils import ray_get
from rlflow.workers.engine_workers import ActorRolloutRefWorker


@pytest.fixture
def queue(ray_cluster):
    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
    yield
    tq.close()


@pytest.fixture(params=[1, 2], ids=["rows apart", "rows shared"])
def group(request, queue, tiny_model):
    """Two processes that each compute half of the rows, or of the tokens of all rows."""
    from omegaconf import OmegaConf

    from rlflow.single_controller.ray import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        create_colocated_worker_cls,
    )

    config = worker_config(
        tiny_model,
        "actor_rollout_ref.actor.use_kl_loss=true",
        f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={request.param}",
    )
    OmegaConf.resolve(config)
    role = "actor_rollout_ref"
    cls = create_colocated_worker_cls({role: RayClassWithInitArgs(ActorRolloutRefWorker, config=config, role=role)})
    pool = RayResourcePool([2], device_name="cpu")
    group = RayWorkerGroup(pool, cls, device_name="cpu")
    yield group.spawn({role})[role]
    group.shutdown()
    pool.release()


@pytest.mark.timeout(240)
def test_a_step_over_the_queue(group, tmp_path):
    group.init_model()
    data = tiny.make_batch(8)
    keys = [f"e0r{i}a0_0_0" for i in range(8)]
    first = tu.get_keys(data, ["input_ids", "responses", "response_mask", "advantages"])
    tq.kv_batch_put(keys, "train", fields=first, tags=[{} for _ in keys])
    meta = KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id="train", extra_info={"temperature": 1.0})
    group.compute_log_prob(meta)
    group.compute_ref_log_prob(meta)
    got = tq.kv_batch_get(keys, "train", ["old_log_probs", "ref_log_prob", "entropy"])
    torch.testing.assert_close(got["old_log_probs"].values(), got["ref_log_prob"].values())
    assert torch.equal(tu.nested_lengths(got["entropy"]), tu.nested_lengths(data["responses"]))
    options = {"mini_batch_size": 4, "epochs": 2, "temperature": 1.0}
    update = KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id="train", extra_info=options)
    metrics = tu.get(group.update_actor(update), "metrics")
    assert metrics["lr"].aggregate() == pytest.approx(1e-3)
    assert len(metrics["grad_norm"].values) == 4
    assert metrics["kl_loss"].aggregate() >= 0
    group.compute_log_prob(meta)
    moved = tq.kv_batch_get(keys, "train", ["old_log_probs"])["old_log_probs"].values()
    assert not torch.allclose(moved, got["ref_log_prob"].values())
    group.save_checkpoint(str(tmp_path / "actor"), None, 1, None)
    group.load_checkpoint(str(tmp_path / "actor"))
    assert (tmp_path / "actor" / "model" / "rank_00001.safetensors").is_file()
    group.bind_rollout([None, None])
    assert ray_get(group.update_weights(1), what="update_weights") == [None, None]
