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

sys.path[:0] = [str(Path(__file__).parents[depth]) for depth in (0, 1, 2)]

from tiny import configs, make_batch, with_values  # noqa: E402

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
    lora_only=False,
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
        save_contents=list(contents),
        load_contents=["model", "optimizer", "extra"],
        async_save=async_save,
        save_lora_only=lora_only,
    )
    engine_cls = FSDPEngineWithValueHead if critic else FSDPEngineWithLMHead
    engine = engine_cls(model, engine_config, optim, checkpoint)
    engine.initialize()
    if load:
        engine.load_checkpoint(load)
    return engine


def full_grads(engine):
    """Gradients by name, gathered where they are sharded."""
    grads = ((n, p.grad) for n, p in engine.module.named_parameters() if p.requires_grad)
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
    """AdamW steps over the batches of `seeds`, optionally from and to a checkpoint."""
    engine = build(path, critic=critic, load=load, optimizer="AdamW", lr=lr, **engine_options)
    losses = [_train_step(engine, critic, seed) for seed in seeds]
    last = engine.lr_scheduler.get_last_lr()[0]
    if save_to:
        engine.save_checkpoint(save_to, global_step=len(seeds))
    last = last if seeds else None
    save(out, {"params": full_params(engine), "losses": losses, "lr": last, "noise": torch.rand(4)})


def _train_step(engine, critic, seed):
    """One AdamW step and the schedule's; the loss over all ranks."""
    with engine.train_mode():
        outputs = engine.train_batch(local_rows(with_values(make_batch(8, seed), seed)), loss_of(critic))
    engine.lr_scheduler_step()
    loss = torch.tensor(sum(outputs["loss"]))
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


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


def layouts(out, *, folder):
    """What depends on how a tensor lies on a 2 x 2 mesh: gradient norms, and shards on disk."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    torch.manual_seed(0)
    save(out, _norms(mesh) | _shards(mesh, Path(folder)))


def _norms(mesh):
    """Norm of three gradients in several layouts, and after clipping to 1."""
    whole = [torch.randn(5, 6), torch.randn(7), torch.randn(4, 4)]
    placed = {
        "HSDP": [(Replicate(), Shard(0))] * 3,
        "both dimensions": [(Shard(0), Shard(1)), (Shard(0), Replicate()), (Shard(1), Shard(0))],
        "one plain": [(Replicate(), Shard(0)), None, (Shard(0), Replicate())],
        "partial": [(Partial(), Shard(0)), (Replicate(), Replicate()), None],
    }
    found = {}
    for name, placements in placed.items():
        params = [torch.nn.Parameter(_placed(grad, mesh, place)) for grad, place in zip(whole, placements, strict=True)]
        for param, grad, place in zip(params, whole, placements, strict=True):
            param.grad = _placed(grad, mesh, place)
        found[name] = (clip_grad_norm(params, 1.0), clip_grad_norm(params, None))
    # Both dimensions of the mesh split dimension 0, as FSDP over tensor parallel does.
    params = [_split_twice(mesh, whole[2]).weight, *(torch.nn.Parameter(grad.clone()) for grad in whole[:2])]
    for param in params:
        param.grad = param.detach().clone()
    found["split twice"] = (clip_grad_norm(params, 1.0), clip_grad_norm(params, None))
    return {"norm": float(torch.cat([grad.flatten() for grad in whole]).norm()), "norms": found}


def _shards(mesh, folder):
    """A weight in several layouts, saved by rows and read back into each of these layouts."""
    weight = torch.randn(8, 6)
    placed = [(Shard(0), Shard(1)), (Replicate(), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Replicate()), None]
    stored = {str(place): _placed(weight, mesh, place) for place in placed}
    stored["split twice"] = _split_twice(mesh, weight).weight
    for file in shard_files(stored.items(), folder):
        file.write()
    dist.barrier()
    equal = True
    with ShardReader(folder) as reader:
        for name in stored:
            for like in stored.values():
                found = torch.zeros_like(like)
                read_into(reader, name, found)
                equal &= torch.equal(local_part(found), local_part(like))
    flags = [None] * 4
    dist.all_gather_object(flags, equal)
    return {"read": all(flags), "weight": weight, "names": list(stored)}


def _split_twice(mesh, weight):
    linear = torch.nn.Linear(*reversed(weight.shape), bias=False)
    first, second = mesh.mesh_dim_names
    linear.weight = torch.nn.Parameter(distribute_tensor(weight.clone(), mesh[second], [Shard(0)]))
    fully_shard(linear, mesh=mesh[first])
    return linear


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
