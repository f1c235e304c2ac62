"""The ranks of `test_executor.py`: `python reshard_job.py FOLDER WORLD_SIZE` forks them after one import for all."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

from rlflow.checkpoint_engine.resharding import layouts
from rlflow.checkpoint_engine.resharding.assembly import plan_assembly
from rlflow.checkpoint_engine.resharding.boxes import Part, local_shape
from rlflow.checkpoint_engine.resharding.executor import plan_reshard
from rlflow.checkpoint_engine.resharding.groups import plan_hybrid_groups
from rlflow.checkpoint_engine.resharding.splits import split_weights
from rlflow.workers.engine.fsdp.engine import FSDPEngineWithLMHead
from rlflow.workers.engine.fsdp.resharded import TensorExport
from rlflow.workers.rollout.hf.server import HFServer
from rlflow.workers.weight_export import WeightExport

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "workers"), str(TESTS / "rollout")]

import rollout_tiny  # noqa: E402
from tiny import configs, save_tiny_model  # noqa: E402

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}


def build(config: Any) -> tuple[Any, dict[str, Tensor]]:
    """A model with the same random weights on every rank, and a copy of them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    return model, {name: value.detach().clone() for name, value in model.named_parameters()}


def take(full: Tensor, part: Part) -> Tensor:
    """The local tensor of a part, made the plain way."""
    local = torch.empty(local_shape(part), dtype=full.dtype)
    for box in part:
        where = tuple(slice(at, at + n) for at, n in zip(box.start, box.size, strict=True))
        local[box.index(box.start, box.size)] = full[where]
    return local


def overlap(one: Part, other: Part) -> int:
    common = [a.cut(b) for a in one for b in other]
    return sum(torch.Size(c[1]).numel() for c in common if c is not None)


def check(
    full: Mapping[str, Tensor],
    held: Mapping[str, Part],
    wanted: Mapping[str, Part],
    local: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float32,
    home: list[int] | None = None,
) -> dict[str, int]:
    """Reshard twice, compare every value, and return what was counted beside what was expected."""
    resharder = plan_reshard(
        list(full),
        {name: (part, full[name].dtype) for name, part in held.items()},
        wanted,
        bucket_bytes=20_000,
        wire_type=lambda name, stored: dtype,
        home=home,
    )
    assert len(resharder.buckets) > 2, "several buckets"
    before = {name: value.clone() for name, value in local.items()}
    for _ in range(2):
        got = dict(resharder.run(local))
        assert list(got) == list(wanted)
        for name, value in got.items():
            want = take(full[name], wanted[name]).to(dtype)
            assert value.dtype == dtype and value.shape == want.shape and torch.equal(value, want), name
        assert resharder.counts.received_bytes == resharder.expected_bytes
    assert all(torch.equal(value, before[name]) for name, value in local.items()), "training weights are as they were"
    bytes_of = {name: value.numel() * dtype.itemsize for name, value in full.items()}
    return {
        "received": resharder.counts.received_bytes,
        "sent": resharder.counts.sent_bytes,
        "wanted": layouts.element_bytes(wanted, dtype.itemsize),
        "held_wanted": sum(overlap(held.get(n, ()), part) for n, part in wanted.items()) * dtype.itemsize,
        "full_gather": sum(bytes_of.values()) - layouts.element_bytes(held, dtype.itemsize),
    }


def tensor_parallel(config: Any, sizes: tuple[int, int, int, int, int]) -> dict[str, int]:
    """Slices of a tensor x pipeline-parallel trainer, and the generation groups of `plan_hybrid_groups`."""
    _, full = build(config)
    plan, rank, layers = plan_hybrid_groups(*sizes), dist.get_rank(), config.num_hidden_layers
    shapes = {name: tuple(value.shape) for name, value in full.items()}
    splits = split_weights(config, shapes)
    held = layouts.training_parts(plan, shapes, splits, layers, rank)
    wanted = layouts.generation_parts(plan, shapes, splits, layers, rank)
    local = {name: take(full[name], part) for name, part in held.items()}
    report = check(full, held, wanted, local, home=plan.micro_dp_of)
    split = [name for name in full if splits[name].dim is not None]
    return report | {"split_bytes": sum(full[name].numel() * 4 for name in split)}


def fsdp(config: Any, dtype: torch.dtype) -> dict[str, int]:
    """Rows of four FSDP ranks, and two replicas of two tensor-parallel ranks each."""
    model, full = build(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    stored = dict(model.named_parameters())
    assert all(isinstance(value, DTensor) for value in stored.values())
    held = {name: layouts.held_part(value) for name, value in stored.items()}
    shapes = {name: tuple(value.shape) for name, value in full.items()}
    wanted = layouts.replica_parts(shapes, split_weights(config, shapes), dist.get_rank(), 2)
    local = {name: value.to_local().detach() for name, value in stored.items()}
    return check(full, held, wanted, local, dtype)


def assembled(config: Any) -> dict[str, int]:
    """What the rank that feeds a replica of two gets: every tensor whole, put together by both ranks."""
    model, full = build(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    stored = {name: value.detach() for name, value in model.named_parameters()}
    assembly = plan_assembly(stored, 2, bucket_bytes=20_000, wire_type=lambda name, dtype: torch.bfloat16)
    for _ in range(2):
        got = {name: value.clone() for name, value in assembly.run(stored)}
        if dist.get_rank() % 2:
            assert not got
        else:
            assert list(got) == list(full)
            assert all(torch.equal(value, full[name].bfloat16()) for name, value in got.items())
    size = sum(value.numel() * 2 for value in full.values())
    return {"received": assembly.counts.received_bytes, "model": size}


def engine_export(path: Path) -> dict[str, int]:
    """The FSDP engine's own weights: shared gathering gives what the full gather gives, after an update too."""
    engine = FSDPEngineWithLMHead(*configs(str(path)), None)
    engine.initialize()
    for _ in range(2):
        whole = {name: value.clone() for name, value in engine.get_per_tensor_param()[0]}
        assert engine.exports.counts is None and engine.exports.metrics() == {}
        shared, _ = engine.get_per_tensor_param(replica_size=2, wire_type=lambda name, dtype: torch.bfloat16)
        got = {name: value.clone() for name, value in shared}
        assert list(got) == (list(whole) if dist.get_rank() % 2 == 0 else [])
        assert all(torch.equal(value, whole[name].bfloat16()) for name, value in got.items())
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.add_(1)
    received = int(engine.exports.metrics()["perf/reshard_bytes"])
    # Three ranks do not divide four: the full gather, on every rank.
    odd = TensorExport()
    assert dict(odd.iterate(engine.module, replica_size=3)).keys() == whole.keys() and odd.counts is None
    return {"received": received, "model": sum(value.numel() * 2 for value in whole.values())}


class Handle:
    """Calls a server of this process as a Ray handle calls one of another."""

    def __init__(self, server: HFServer) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._server, name))


async def weight_sync(path: Path) -> dict[str, int]:
    """Two ranks feed one real server: it holds the weights, the receipt and the bytes say so."""
    model_config, *engine_configs = configs(str(path))
    engine = FSDPEngineWithLMHead(model_config, *engine_configs, None)
    engine.initialize()
    whole = {name: value.clone() for name, value in engine.get_per_tensor_param()[0]}
    node = rollout_tiny.config(str(path), load_format="dummy").actor_rollout_ref
    leads = dist.get_rank() % 2 == 0
    server = HFServer(node.rollout, node.model, dist.get_rank() // 2) if leads else None
    export = WeightExport(node.rollout, model_config, dist.get_rank(), dist.get_world_size())
    export.bind(Handle(server) if server is not None else None, 2)
    if server is not None:
        await server.abort_all_requests()
    receipt = await export.send(engine, 3, None, None)
    if server is None:
        assert receipt is None
        return {}
    assert receipt is not None and receipt.version == 3 == await server.weight_version()
    held = dict(server._engine.model.module.named_parameters())
    assert all(torch.equal(held[name], value) for name, value in whole.items())
    await server.shutdown()
    model = sum(value.numel() * value.element_size() for value in whole.values())
    assert receipt.total_bytes == model and receipt.metrics["timing_s/reshard"] > 0
    return {"received": int(receipt.metrics["perf/reshard_bytes"]), "model": model}


def run_rank(folder: Path, rank: int, world: int) -> None:
    store = dist.FileStore(str(folder / "rendezvous"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    llama, phi = LlamaConfig(**SIZES), Phi3Config(**SIZES)
    report = {
        "tp4_to_tp2": tensor_parallel(llama, (1, 4, 1, 1, 2)),
        "phi_tp4_to_tp2": tensor_parallel(phi, (1, 4, 1, 1, 2)),
        "pp2_tp2_to_tp2": tensor_parallel(llama, (2, 2, 1, 1, 2)),
        "tp4_to_tp4": tensor_parallel(llama, (1, 4, 1, 1, 4)),
        "fsdp4_to_tp2": fsdp(llama, torch.float32),
        "fsdp4_to_tp2_bf16": fsdp(llama, torch.bfloat16),
        "phi_fsdp4_to_tp2": fsdp(phi, torch.float32),
        "assembled": assembled(llama),
        "phi_assembled": assembled(phi),
        "engine": engine_export(folder / "model"),
        "weight_sync": asyncio.run(weight_sync(folder / "model")),
    }
    (folder / f"rank_{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def main() -> int:
    folder, world = Path(sys.argv[1]), int(sys.argv[2])
    save_tiny_model(folder / "model")
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(folder, rank, world)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    return 0 if codes == [0] * world else 1


if __name__ == "__main__":
    sys.exit(main())
