"""The sender against a real server actor of the embedded engine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
import rollout_tiny as tiny
import torch

from rlflow.checkpoint_engine.base import TensorMeta, WeightReceipt, build_sender
from rlflow.checkpoint_engine.shared_memory import Segment, open_bucket
from rlflow.utils.errors import ContractError, WeightSyncError
from rlflow.utils.ray_utils import ray_get


@pytest.fixture(scope="module")
def server(ray_cluster, model_path):
    import ray

    from rlflow.workers.rollout.hf.server import HFServer

    node = tiny.config(model_path, load_format="dummy", dtype="bfloat16").actor_rollout_ref
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    server = (
        ray.remote(HFServer)
        .options(num_cpus=0, max_concurrency=16, runtime_env={"env_vars": env})
        .remote(node.rollout, node.model, 3)
    )
    ray_get(server.abort_all_requests.remote(), what="the server", timeout_s=120)
    yield server
    ray.kill(server)


@pytest.fixture(scope="module")
def params(model_path):
    return [(name, p.detach()) for name, p in tiny.plain_model(model_path).named_parameters()]


def send(sender, server, params, version=1):
    return asyncio.run(sender.send(iter(params), server, version))


def sender_with(bucket_mb):
    config = tiny.config("unused", dtype="bfloat16").actor_rollout_ref.rollout
    config.checkpoint_engine.update_weights_bucket_megabytes = bucket_mb
    return build_sender(config, 0, 1)


@pytest.mark.parametrize("bucket_mb", [2048, 0.04, 0.0001])
def test_buckets_of_any_size_carry_all_tensors(server, params, bucket_mb):
    """0.04 MB: several tensors in some buckets, one tensor larger than a bucket; 0.0001 MB: each is larger."""
    moved = [(name, p + bucket_mb) for name, p in params]
    receipt = send(sender_with(bucket_mb), server, moved, version=5)
    assert (receipt.version, receipt.tensor_count) == (5, len(params))
    assert receipt.total_bytes == sum(p.numel() for _, p in params) * 2
    assert receipt.holder == "Rollout replica 3"
    held = ray_get(
        server.__ray_call__.remote(lambda s: {n: p.clone() for n, p in s._engine.model.module.named_parameters()}),
        what="the weights",
        timeout_s=60,
    )
    for name, p in moved:
        assert torch.equal(held[name].to(torch.bfloat16), p.to(torch.bfloat16))


def test_the_receipt_does_not_depend_on_order_or_buckets(server, params):
    first = send(sender_with(2048), server, params)
    second = send(sender_with(0.04), server, params[::-1])
    assert first.checksum == second.checksum and first.same_weights(second)


def test_tied_weights_may_come_under_both_names(server, params):
    embedding = dict(params)["model.embed_tokens.weight"]
    receipt = send(sender_with(2048), server, [*params, ("lm_head.weight", embedding)])
    assert receipt.tensor_count == len(params) + 1


def test_a_wrong_shape_is_named(server, params):
    wrong = [(name, p[:1] if name == "model.norm.weight" else p) for name, p in params]
    with pytest.raises(WeightSyncError, match=r"'model.norm.weight' with shape \(1,\); the served model has \(64,\)"):
        send(sender_with(2048), server, wrong)
    send(sender_with(2048), server, params)


def test_a_transfer_that_stopped_half_way_does_not_count_for_the_next(server, params):
    def broken():
        yield from params[:8]
        raise OSError("the device is gone")

    with pytest.raises(OSError, match="the device is gone"):
        send(sender_with(0.0001), server, broken())
    with pytest.raises(
        WeightSyncError, match="replica 3, weight version 1: 1 parameters .*: model.embed_tokens.weight"
    ):
        send(sender_with(0.0001), server, params[1:])
    send(sender_with(2048), server, params)


def test_a_rank_without_a_server_exhausts_its_iterator(params):
    seen = []

    def gathering():
        for item in params:
            seen.append(item[0])
            yield item

    assert send(sender_with(2048), None, gathering()) is None
    assert len(seen) == len(params)


def test_the_sender_leaves_no_memory_behind(server, params):
    def links():
        return [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{fd}")
        ]

    send(sender_with(0.04), server, params)
    with pytest.raises(WeightSyncError):
        send(sender_with(0.04), server, params[1:])
    assert not [link for link in links() if "rlflow-weights" in link]
    with open("/proc/self/maps") as maps:
        assert "rlflow-weights" not in maps.read()
    send(sender_with(2048), server, params)


def test_nothing_is_written_at_exit(tmp_path):
    """No resource tracker is involved, so none can warn about leaked segments."""
    script = (
        "from rlflow.checkpoint_engine.shared_memory import Segment, open_bucket\n"
        "from rlflow.checkpoint_engine.base import TensorMeta\n"
        "s = Segment('x'); s.view(64)[:4] = 1\n"
        "with open_bucket(s.path, [TensorMeta('t', (4,), 'uint8', 0, 4, 0)]) as tensors:\n"
        "    assert tensors[0][1].tolist() == [1, 1, 1, 1]\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_bucket_that_is_gone_or_too_short_is_an_error():
    segment = Segment("short")
    segment.view(16)
    meta = TensorMeta("t", (8,), "float32", 0, 32, 0)
    with pytest.raises(WeightSyncError, match="16 bytes; its tensors need 32"), open_bucket(segment.path, [meta]):
        pass
    segment.close()
    with pytest.raises(WeightSyncError, match="cannot open"), open_bucket(segment.path, [meta]):
        pass


def test_receipts_differ_with_a_message_of_both_sides():
    sent = WeightReceipt(4, 10, 200, 0xAB)
    with pytest.raises(
        WeightSyncError, match="Rollout replica 1 does not.*version 4, 10 tensors.*got version 4, 9 tensors"
    ):
        sent.require_same(WeightReceipt(4, 9, 180, 0xAC, holder="Rollout replica 1"))
    sent.require_same(WeightReceipt(4, 10, 200, 0xAB, seconds=3.0))


def test_loading_needs_an_engine_at_rest(server, params):
    ray_get(server.resume_generation.remote(), what="resume", timeout_s=30)
    with pytest.raises(ContractError, match="pause it"):
        send(sender_with(2048), server, params)
    ray_get(server.abort_all_requests.remote(), what="pause", timeout_s=30)


def adapter(rank=4):
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    return [(f"{path}.lora_A.weight", torch.randn(rank, 64)), (f"{path}.lora_B.weight", torch.randn(64, rank))]


def send_adapter(server, tensors, version):
    lora = {"r": 4, "lora_alpha": 8}
    return asyncio.run(sender_with(2048).send(iter(tensors), server, version, lora))


def test_an_adapter_goes_beside_the_base_weights(server, params):
    base = send(sender_with(2048), server, params, version=20)
    receipt = send_adapter(server, adapter(), 21)
    assert receipt.lora_modules == ("model.layers.0.self_attn.q_proj",) and base.lora_modules is None
    assert receipt.tensor_count == 2 and receipt.total_bytes == 2 * 2 * 4 * 64
    tokens = list(range(3, 40))
    with_adapter = ray_get(server.prompt_log_probs.remote(tokens), what="log-probs", timeout_s=30)
    send(sender_with(2048), server, params, version=22)
    assert ray_get(server.prompt_log_probs.remote(tokens), what="log-probs", timeout_s=30) != with_adapter


def test_an_adapter_that_is_bound_to_no_module_stops_the_run(server, params):
    send(sender_with(2048), server, params)
    with pytest.raises(WeightSyncError, match="replica 3 took a LoRA adapter but bound it to no module"):
        send_adapter(server, [], 2)
    strange = [(name.replace("q_proj", "x_proj"), tensor) for name, tensor in adapter()]
    with pytest.raises(WeightSyncError, match="no linear layer 'model.layers.0.self_attn.x_proj'"):
        send_adapter(server, strange, 2)
    send(sender_with(2048), server, params)


def test_tied_weights_with_two_values_do_not_pass(server, params):
    """One parameter cannot hold both; whichever came first is gone."""
    other = dict(params)["model.embed_tokens.weight"] + 1
    with pytest.raises(WeightSyncError, match="hold other values than were sent: (model.embed_tokens|lm_head).weight"):
        send(sender_with(0.0001), server, [*params, ("lm_head.weight", other)])
    send(sender_with(2048), server, params)
