"""Work that tests run in several processes: `python rank_jobs.py JOB OUT JSON`, with torchrun's environment."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from tiny import configs, make_batch, with_values  # noqa: E402

from rlflow.checkpoint.background import BackgroundFiles  # noqa: E402
from rlflow.checkpoint.shards import ShardReader  # noqa: E402
from rlflow.config import (  # noqa: E402
    CheckpointConfig,
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPEngineConfig,
    TrainingWorkerConfig,
)
from rlflow.utils import tensordict_utils as tu  # noqa: E402
from rlflow.workers.engine.batching import count_loss_tokens  # noqa: E402
from rlflow.workers.engine.fsdp.engine import FSDPEngineWithLMHead, FSDPEngineWithValueHead  # noqa: E402
from rlflow.workers.engine.fsdp.optim import clip_grad_norm  # noqa: E402
from rlflow.workers.engine.fsdp.shards import local_part, read_into, shard_files  # noqa: E402
from rlflow.workers.losses import ppo_loss, value_loss  # noqa: E402
from rlflow.workers.training_worker import TrainingWorker  # noqa: E402


def build(
    path,
    *,
    critic=False,
    load=None,
    contents=("model", "optimizer", "extra"),
    async_save=False,
    fsdp_size=None,
    **options,
):
    known = {field.name for field in dataclasses.fields(FSDPEngineConfig)}
    if fsdp_size is not None and "fsdp_size" in known:
        options["fsdp_size"] = fsdp_size
    model, engine_config, optim = configs(path, **options)
    if fsdp_size is not None and "fsdp_size" not in known:
        engine_config.fsdp_size = fsdp_size
    checkpoint = CheckpointConfig(
        save_contents=list(contents), load_contents=["model", "optimizer", "extra"], async_save=async_save
    )
    engine_cls = FSDPEngineWithValueHead if critic else FSDPEngineWithLMHead
    engine = engine_cls(model, engine_config, optim, checkpoint)
    engine.initialize()
    if load:
        engine.load_checkpoint(load)
    return engine


def full_grads(engine):
    """Gradients by name, gathered where they are sharded."""
    grads = ((n, p.grad) for n, p in engine.module.named_parameters())
    return {n: (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone() for n, grad in grads}


def full_params(engine):
    return {n: t.clone() for n, t in engine.get_per_tensor_param()[0]}


def local_rows(data):
    size = data.batch_size[0] // dist.get_world_size()
    return tu.slice_tensordict(data, dist.get_rank() * size, (dist.get_rank() + 1) * size)


def loss_of(critic, options=None):
    if critic:
        return partial(value_loss, config=FSDPCriticConfig(**(options or {})))
    return partial(ppo_loss, config=FSDPActorConfig(**(options or {})))


def gradient(path, out, *, critic=False, steps=0, seed=0, loss=None, options=None, rows=8, masked=0, **engine_options):
    """Gradient of one mini-batch (its last rows `masked`), outputs of all rows, parameters after `steps` more steps."""
    engine = build(path, critic=critic, **engine_options)
    loss_fn = loss_of(critic, loss)

    def batch(seed):
        data = with_values(make_batch(rows, seed), seed)
        mask = data["response_mask"]
        dropped = [row * (i < rows - masked) for i, row in enumerate(mask.unbind())]
        data.set("response_mask", tu.nested_like(torch.cat(dropped), mask))
        return local_rows(tu.assign_non_tensor_whole(data, options or {}))

    data = batch(seed)
    counts = count_loss_tokens(data, engine.get_data_parallel_group(), engine.get_data_parallel_size(), engine.device)
    result = {"counts": list(dataclasses.astuple(counts))}
    with engine.train_mode():
        outputs = engine.forward_backward_batch(data, loss_fn)
        result["grads"] = full_grads(engine)
    name = "values" if critic else "log_probs"
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [row.clone() for row in outputs["model_output"][name].unbind()])
    result[name] = [row for part in parts for row in part]
    result["loss"] = torch.tensor(sum(outputs["loss"]))
    dist.all_reduce(result["loss"])
    result["loss"] /= dist.get_world_size()
    result["micro"] = [None] * dist.get_world_size()
    dist.all_gather_object(result["micro"], len(outputs["loss"]))
    for step in range(steps):
        with engine.train_mode():
            engine.train_batch(batch(seed + step), loss_fn)
    result["params"] = full_params(engine)
    save(out, result)


def train(path, out, *, seeds, critic=False, load=None, save_to=None, lr=1e-2, **engine_options):
    """AdamW steps over the batches of `seeds`, optionally from and to a checkpoint; one that is written in the
    background is written while two more steps change everything.
    """
    engine = build(path, critic=critic, load=load, optimizer="AdamW", lr=lr, **engine_options)
    losses = [_train_step(engine, critic, seed) for seed in seeds]
    last = engine.lr_scheduler.get_last_lr()[0]
    params, noise = full_params(engine), None
    if save_to:
        mark = engine.save_checkpoint(save_to, global_step=len(seeds))
        if mark is not None:
            noise = torch.rand(4)
            for seed in (100, 101):
                _train_step(engine, critic, seed)
            BackgroundFiles([mark], 60).wait()
            dist.barrier()
    noise = torch.rand(4) if noise is None else noise
    save(out, {"params": params, "losses": losses, "lr": last if seeds else None, "noise": noise})


def _train_step(engine, critic, seed):
    """One AdamW step and the schedule's; the loss over all ranks."""
    with engine.train_mode():
        outputs = engine.train_batch(local_rows(with_values(make_batch(8, seed), seed)), loss_of(critic))
    engine.lr_scheduler_step()
    loss = torch.tensor(sum(outputs["loss"]))
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def shard_layouts(out, *, folder):
    """Tensors of several layouts of a 2 x 2 mesh, saved by rows and read back into each of these layouts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    torch.manual_seed(0)
    linear = torch.nn.Linear(6, 7, bias=False)
    weight = linear.weight.detach().clone()
    linear.weight = torch.nn.Parameter(distribute_tensor(weight, mesh["tp"], [Shard(0)]))
    fully_shard(linear, mesh=mesh["fsdp"])  # both dimensions of the mesh split dimension 0
    placements = [(Shard(0), Shard(1)), (Replicate(), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Replicate()), None]
    stored = {"strided": linear.weight}
    stored |= {str(i): weight if p is None else distribute_tensor(weight, mesh, p) for i, p in enumerate(placements)}
    for file in shard_files(stored.items(), Path(folder)):
        file.write()
    dist.barrier()
    equal = True
    with ShardReader(Path(folder)) as reader:
        for name in stored:
            for like in stored.values():
                found = torch.zeros_like(like)
                read_into(reader, name, found)
                equal &= torch.equal(local_part(found), local_part(like))
    flags = [None] * 4
    dist.all_gather_object(flags, equal)
    save(out, {"equal": all(flags), "weight": weight, "names": list(stored)})


def poisoned(path, out, *, folder, row):
    """One update over a batch in which an advantage of `row` is NaN."""
    model, engine_config, optim = configs(path, optimizer="AdamW")
    config = TrainingWorkerConfig(model_config=model, engine_config=engine_config, optimizer_config=optim)
    worker = TrainingWorker(config)
    worker.reset()
    worker.set_loss_fn(loss_of(False))
    data = make_batch(8)
    values, mask = ([part.clone() for part in data[name].unbind()] for name in ("advantages", "response_mask"))
    values[row][0], mask[row][0] = float("nan"), 1
    data.set("advantages", tu.nested_from_list(values)).set("response_mask", tu.nested_from_list(mask))
    options = {"mini_batch_size": 8, "nonfinite_dump_folder": folder}
    worker.train_mini_batch(tu.assign_non_tensor_whole(local_rows(data), options))
    save(out, {})


def norms(out):
    """Norm of three gradients in several layouts of a 2 x 2 mesh, and after clipping to 1."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    torch.manual_seed(0)
    whole = [torch.randn(5, 6), torch.randn(7), torch.randn(4, 4)]
    layouts = {
        "HSDP": [(Replicate(), Shard(0))] * 3,
        "both dimensions": [(Shard(0), Shard(1)), (Shard(0), Replicate()), (Shard(1), Shard(0))],
        "one plain": [(Replicate(), Shard(0)), None, (Shard(0), Replicate())],
        "partial": [(Partial(), Shard(0)), (Replicate(), Replicate()), None],
    }
    result = {}
    for name, placements in layouts.items():
        params = [torch.nn.Parameter(_placed(grad, mesh, place)) for grad, place in zip(whole, placements, strict=True)]
        for param, grad, place in zip(params, whole, placements, strict=True):
            param.grad = _placed(grad, mesh, place)
        result[name] = (clip_grad_norm(params, 1.0), clip_grad_norm(params, None))
    save(out, {"expected": float(torch.cat([grad.flatten() for grad in whole]).norm()), "norms": result})


def _placed(tensor, mesh, placements):
    if placements is None:
        return tensor.clone()
    if any(place.is_partial() for place in placements):
        local = distribute_tensor(tensor / 2, mesh, [Replicate(), *placements[1:]]).to_local()
        return DTensor.from_local(local, mesh, placements, shape=tensor.shape, stride=tensor.stride())
    return distribute_tensor(tensor.clone(), mesh, placements)


def save(out, result):
    if dist.get_rank() == 0:
        torch.save(result, out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    job, out, kwargs = sys.argv[1:4]
    os.environ.setdefault("RLFLOW_DEVICE", "cpu")
    globals()[job](out=out, **json.loads(kwargs))
    dist.destroy_process_group()
