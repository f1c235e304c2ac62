"""In which type tensors travel, and that a server holds exactly that."""

from __future__ import annotations

import asyncio

import pytest
import rollout_tiny as tiny
import torch

from rlflow.checkpoint_engine.base import build_sender
from rlflow.checkpoint_engine.disk import DiskCheckpointEngine
from rlflow.checkpoint_engine.wire import WireTypes
from rlflow.utils.errors import ConfigError
from rlflow.workers.rollout.hf.model import load_model

KEPT = "*.mlp.gate_proj.weight"


def config(path="unused", **rollout):
    node = tiny.config(path, dtype="bfloat16", load_format="dummy", **rollout)
    node.actor_rollout_ref.rollout.checkpoint_engine.keep_fp32 = [KEPT]
    return node.actor_rollout_ref


def test_patterns_keep_fp32_and_integers_stay():
    types = WireTypes.from_config(config().rollout)
    assert types.of("model.layers.0.mlp.gate_proj.weight", torch.float32) is torch.float32
    assert types.of("model.layers.0.mlp.up_proj.weight", torch.float32) is torch.bfloat16
    assert types.of("model.layers.0.mlp.gate_proj.weight", torch.bfloat16) is torch.float32
    assert types.of("steps", torch.int64) is torch.int64
    with pytest.raises(ConfigError, match="rollout.dtype=int4"):
        WireTypes.from_config(tiny.config("unused", dtype="int4").actor_rollout_ref.rollout)


class LocalServer:
    """The remote methods of a server over a model in this process."""

    def __init__(self, model):
        self.model, self.bytes = model, 0

    def __getattr__(self, method):
        from rlflow.checkpoint_engine.base import WeightReceipt
        from rlflow.workers.rollout.hf.server import copy_bucket

        async def begin_update(version):
            self.model.begin()

        async def load_bucket(metas, path):
            copy_bucket(metas, path, self.model)
            self.bytes += sum(meta.size for meta in metas)
            return sum(meta.size for meta in metas)

        async def finish_update(version, count, checksum):
            found = self.model.finish()
            return WeightReceipt(version, found[0], self.bytes, found[1], names=self.model.loaded)

        calls = {"begin_update": begin_update, "load_bucket": load_bucket, "finish_update": finish_update}
        return type("Method", (), {"remote": staticmethod(calls[method])})


def test_the_server_holds_each_tensor_in_its_type(model_path):
    node = config(model_path, engine_kwargs={"hf": {"compute_dtype": "float32"}})
    model = load_model(node.model, node.rollout, torch.device("cpu"))
    params = {name: p.detach() + 1e-4 for name, p in tiny.plain_model(model_path).named_parameters()}
    receipt = asyncio.run(build_sender(node.rollout, 0, 1).send(iter(params.items()), LocalServer(model), 3))
    held = dict(model.module.named_parameters())
    kept = [name for name in params if name.endswith("mlp.gate_proj.weight")]
    assert kept
    for name, value in params.items():
        wanted = value if name in kept else value.to(torch.bfloat16).float()
        assert torch.equal(held[name], wanted), name
    size = sum(p.numel() * (4 if name in kept else 2) for name, p in params.items())
    assert receipt.total_bytes == size == sum(bucket.total_bytes for bucket in receipt.buckets)
    assert receipt.names == tuple(sorted(params))


def test_an_engine_that_cannot_keep_fp32_says_so(model_path):
    node = config(model_path, engine_kwargs={"hf": {"compute_dtype": "bfloat16"}})
    with pytest.raises(ConfigError, match=r"keep_fp32=.*hf engine while it computes in torch.bfloat16"):
        load_model(node.model, node.rollout, torch.device("cpu"))


def test_other_backends_get_the_tensors_cast_already(tmp_path):
    types = WireTypes.from_config(config().rollout)
    params = [("a.mlp.gate_proj.weight", torch.randn(3, 5)), ("b.weight", torch.randn(7)), ("n", torch.tensor(3))]
    engine = DiskCheckpointEngine(10**6, is_master=True, folder=str(tmp_path))
    engine.prepare()
    asyncio.run(engine.send_weights(types.cast(params), 1))

    async def read():
        return {name: tensor.clone() async for name, tensor in engine.receive_weights(1)}

    got = asyncio.run(read())
    assert [got[name].dtype for name, _ in params] == [torch.float32, torch.bfloat16, torch.int64]
    for name, value in params:
        assert torch.equal(got[name], value.to(got[name].dtype))


@pytest.mark.gpu
def test_a_bucket_in_the_memory_of_a_gpu(model_path):
    """The trainer's tensors are on the device, and another process opens them by a CUDA IPC handle."""
    import subprocess
    import sys

    from rlflow.checkpoint_engine.checksum import copy_with_digest
    from rlflow.checkpoint_engine.receipt import TensorMeta
    from rlflow.checkpoint_engine.segments import make_segment

    device = torch.device("cuda")
    segment = make_segment("unused", device)
    value = torch.randn(1000, 33, device=device)
    digest = copy_with_digest("t", value, segment.view(value.numel() * 2).view(torch.bfloat16)[: value.numel()])
    segment.seal()
    meta = TensorMeta("t", (1000, 33), "bfloat16", 0, value.numel() * 2, 0, digest)
    script = (
        "import sys, torch; torch.cuda.init()\n"
        "from rlflow.checkpoint_engine.receipt import TensorMeta\n"
        "from rlflow.checkpoint_engine.segments import open_bucket\n"
        f"with open_bucket(sys.argv[1], [{meta!r}]) as tensors:\n"
        "    print(tensors[0][1].double().sum().item())\n"
    )
    done = subprocess.run([sys.executable, "-c", script, segment.path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(value.bfloat16().double().sum().item())
    segment.close()
