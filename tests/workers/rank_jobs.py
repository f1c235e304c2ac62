"""Work that tests run in several processes: `python rank_jobs.py JOB OUT JSON`, with WORLD_SIZE and MASTER_*."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

sys.path[:0] = [str(Path(__file__).parents[depth]) for depth in (0, 1, 2)]

import parallel_cases  # noqa: E402
from tiny import configs, make_batch, with_values  # noqa: E402

from rlflow.checkpoint.shards import ShardReader  # noqa: E402
from rlflow.config import (  # noqa: E402
    CheckpointConfig,
    FSDPActorConfig,
    FSDPCriticConfig,
    TrainingWorkerConfig,
)
from rlflow.utils import tensordict_utils as tu  # noqa: E402
from rlflow.utils.device import get_nccl_backend  # noqa: E402
from rlflow.workers.engine.batching import count_loss_tokens  # noqa: E402
from rlflow.workers.engine.fsdp.engine import FSDPEngineWithLMHead, FSDPEngineWithValueHead  # noqa: E402
from rlflow.workers.engine.fsdp.optim import build_lr_scheduler, build_optimizer, clip_grad_norm  # noqa: E402
from rlflow.workers.engine.fsdp.shards import local_part, read_into, shard_files  # noqa: E402
from rlflow.workers.losses import ppo_loss, value_loss  # noqa: E402
from rlflow.workers.training_worker import TrainingWorker  # noqa: E402

ADAMW_LR = 1e-3


def build(
    path,
    *,
    critic=False,
    load=None,
    contents=("model", "optimizer", "extra"),
    async_save=False,
    lora_only=False,
    **options,
):
    model, engine_config, optim = configs(path, **options)
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
    return {n: (grad.full_tensor() if isinstance(grad, DTensor) else grad).cpu().clone() for n, grad in grads}


def trained_params(engine):
    """What is trained, by its own name."""
    params = ((n, p.detach()) for n, p in engine.module.named_parameters() if p.requires_grad)
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).cpu().clone() for n, p in params}


def full_params(engine):
    return {n: t.cpu().clone() for n, t in engine.get_per_tensor_param()[0]}


def local_rows(data, engine):
    """The rows of this rank; ranks that share the tokens of a row get the same ones."""
    rank, size = engine.get_data_parallel_rank(), data.batch_size[0] // engine.get_data_parallel_size()
    return tu.slice_tensordict(data, rank * size, (rank + 1) * size)


def collected(engine, rows):
    """Rows of all data-parallel ranks in order, each from the rank that answers for it."""
    mine = (engine.get_data_parallel_rank(), engine.is_mp_src_rank_with_outputs(), rows)
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return [row for _, answers, part in sorted(ranks, key=lambda rank: rank[0]) if answers for row in part]


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
        return local_rows(tu.assign_non_tensor_whole(data, options or {}), engine)

    data = batch(seed)
    counts = count_loss_tokens(data, engine.get_data_parallel_group(), engine.get_data_parallel_size(), engine.device)
    result = {"counts": list(dataclasses.astuple(counts))}
    with engine.train_mode():
        outputs = engine.forward_backward_batch(data, loss_fn)
        result["grads"] = full_grads(engine)
    name = "values" if critic else "log_probs"
    result[name] = collected(engine, [row.clone() for row in outputs["model_output"][name].unbind()])
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
        outputs = engine.train_batch(local_rows(with_values(make_batch(8, seed), seed), engine), loss_of(critic))
    engine.lr_scheduler_step()
    loss = torch.tensor(sum(outputs["loss"]))
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def poisoned(path, out, *, folder, row, **options):
    """One update over a batch in which an advantage of `row` is NaN."""
    model, engine_config, optim = configs(path, optimizer="AdamW", **options)
    config = TrainingWorkerConfig(model_config=model, engine_config=engine_config, optimizer_config=optim)
    worker = TrainingWorker(config)
    worker.reset()
    worker.set_loss_fn(loss_of(False))
    data = make_batch(8)
    values, mask = ([part.clone() for part in data[name].unbind()] for name in ("advantages", "response_mask"))
    values[row][0], mask[row][0] = float("nan"), 1
    data.set("advantages", tu.nested_from_list(values)).set("response_mask", tu.nested_from_list(mask))
    options = {"mini_batch_size": 8, "nonfinite_dump_folder": folder}
    worker.train_mini_batch(tu.assign_non_tensor_whole(local_rows(data, worker.engine), options))
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


def table_loss(case):
    return loss_of(
        case["critic"], {} if case["critic"] else {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01}
    )


def build_case(models, case, optimizer="AdamW", lr=ADAMW_LR, **options):
    return build(optimizer=optimizer, lr=lr, **parallel_cases.engine_options(case, models), **options)


def run_case(models, case, steps=3, saved=None):
    """Outputs, gradient and load of the first mini-batch, what `steps` of SGD and of AdamW train; always one data."""
    critic = case["critic"]
    loss_fn = table_loss(case)
    result = {}
    engine = build_case(models, case, "SGD", 0.05)
    start = [local_part(param).detach().clone() for param in engine.module.parameters()]
    for optimizer in ("SGD", "AdamW"):
        if optimizer == "AdamW":
            start_again(engine, start)
        for seed in range(steps):
            data = tu.assign_non_tensor_whole(parallel_cases.rollouts(seed), parallel_cases.batch_options(case))
            with engine.train_mode():
                outputs = engine.forward_backward_batch(local_rows(data, engine), loss_fn)
                if not result:
                    rows = outputs["model_output"]["values" if critic else "log_probs"].unbind()
                    result = {"outputs": collected(engine, list(rows)), "grads": full_grads(engine)}
                    result["loss"] = sum(collected(engine, [sum(outputs["loss"])])) / engine.get_data_parallel_size()
                    metrics = outputs["metrics"].items()
                    result["load"] = {name: m.aggregate() for name, m in metrics if name.startswith("moe/")}
                engine.optimizer_step()
        result[optimizer] = trained_params(engine)
        if optimizer == "SGD":
            result["exported"] = full_params(engine)
    if saved is not None:
        result |= save_and_go_on(engine, loss_fn, case, *saved)
    return result


@torch.no_grad()
def start_again(engine, start):
    """Back to the weights `start`, to train them by AdamW: building an engine anew would take longer."""
    for param, value in zip(engine.module.parameters(), start, strict=True):
        local_part(param).copy_(value)
    engine.optimizer_config = configs("", optimizer="AdamW", lr=ADAMW_LR)[2]
    engine.optimizer = build_optimizer(engine.module.trained_parameters(), engine.optimizer_config)
    engine.lr_scheduler = build_lr_scheduler(engine.optimizer, engine.optimizer_config)


def plain_results(models):
    """What one process gives, by kind of case."""
    return {parallel_cases.kind(case): run_case(models, case) for case in parallel_cases.plain_cases()}


def step_on(engine, loss_fn, case, seed=3):
    """Parameters after one more step."""
    data = tu.assign_non_tensor_whole(parallel_cases.rollouts(seed), parallel_cases.batch_options(case))
    with engine.train_mode():
        engine.train_batch(local_rows(data, engine), loss_fn)
    return trained_params(engine)


def save_and_go_on(engine, loss_fn, case, save_to, load=None):
    """Save here, go on by a step; then load what another sharding saved."""
    engine.save_checkpoint(save_to)
    result = {"next": step_on(engine, loss_fn, case)}
    if load:
        engine.load_checkpoint(load)
        result["loaded"] = trained_params(engine)
    return result


def tables(out, *, models, cases, folder=None):
    """`run_case` of the cases of each world size, in groups of the first ranks, one after the other: starting costs."""
    results = {}
    for world in cases:
        if (rank := int(os.environ["RANK"])) < int(world):
            store = f"file://{out}.{world}"
            dist.init_process_group(get_nccl_backend(), init_method=store, rank=rank, world_size=int(world))
            savers = parallel_cases.savers(cases[world]) if folder else []
            # Where each of them saves, and what the one before it saved.
            saved = {
                i: [f"{folder}/{world}_{n}" for n in savers[max(0, k - 1) : k + 1]][::-1] for k, i in enumerate(savers)
            }
            results[int(world)] = [run_case(models, case, saved=saved.get(i)) for i, case in enumerate(cases[world])]
            dist.destroy_process_group()
    if rank == 0:
        torch.save(results, out)


def in_turn(out, *, jobs):
    """The results of several (job, arguments): starting costs more than they do."""
    results = []
    for job, kwargs in jobs:
        globals()[job](out=out, **kwargs)
        if dist.get_rank() == 0:
            results.append(torch.load(out, weights_only=True))
        dist.barrier()
    save(out, results)


def save(out, result):
    if dist.get_rank() == 0:
        torch.save(result, out)


def end_with_parent():
    """Be killed when the process that started this one is gone, however it ended."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def run_rank(rank, job, out, kwargs):
    end_with_parent()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if os.environ["RLFLOW_DEVICE"] == "cuda":
        torch.cuda.set_device(rank)
    globals()[job](out=out, **json.loads(kwargs))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    end_with_parent()
    torch.set_num_threads(1)
    os.environ.setdefault("RLFLOW_DEVICE", "cpu")
    # Imports are most of a rank's life here: they are done once, before the ranks part. No thread runs yet.
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(r, *sys.argv[1:4])) for r in range(int(os.environ["WORLD_SIZE"]))]
    for process in ranks:
        process.start()
    pending = {process.sentinel: process for process in ranks}
    while pending:
        for sentinel in multiprocessing.connection.wait(pending):
            process = pending.pop(sentinel)
            process.join()  # the sentinel is ready a moment before the exit code is
            if process.exitcode != 0:
                for other in pending.values():  # they wait for it in a collective
                    other.kill()
                sys.exit(f"a rank of {sys.argv[1]} ended with {process.exitcode} (negative: by that signal)")
