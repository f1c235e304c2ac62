"""`TrainingWorker`: one model on one rank, and the calls that train it, run it and save it.

Invariants
    - Every method is called on all ranks of a group; its collectives meet.
    - Options travel in the batch as objects for the whole batch and are read into typed records here (options.py).
    - Metrics are `Metric`s gathered over ranks once a call, so that every rank returns the same.
"""

from __future__ import annotations

import dataclasses
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from tensordict import TensorDict

from rlflow.config import TrainingWorkerConfig
from rlflow.single_controller.base import Dispatch, Worker, WorkerContext, mesh, register
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.device import get_torch_device
from rlflow.utils.errors import ConfigError, ContractError
from rlflow.utils.flops_counter import FlopsCounter, get_device_flops
from rlflow.utils.metric import AggregationType, Metric
from rlflow.workers.engine.base import BaseEngine, LossFunction
from rlflow.workers.engine.options import CallOptions, UpdateOptions, read_names
from rlflow.workers.engine.process import prepare_process
from rlflow.workers.engine.registry import EngineRegistry
from rlflow.workers.nonfinite.dump import DumpRequest, write_dump
from rlflow.workers.nonfinite.guard import NonFiniteGuard

Metrics = dict[str, Metric]


@dataclasses.dataclass
class _Step:
    """What one optimizer step (or one inference) left on this rank; gathered over ranks."""

    metrics: Metrics
    loss: float
    grad_norm: float | None = None


class TrainingWorker(Worker):
    """One model on one rank, and what can be done with it.

    Args:
        config: the model, its engine, optimizer and checkpoint options.
        context: place in the group; None: from the environment.
    """

    def __init__(self, config: TrainingWorkerConfig, *, context: WorkerContext | None = None) -> None:
        super().__init__(context=context)
        prepare_process(self.context)
        if config.engine_config is None:
            raise ConfigError("TrainingWorkerConfig.engine_config is missing; nothing says how the model is trained")
        self.config = config
        self.engine_config = config.engine_config
        self.engine: BaseEngine = EngineRegistry.new(
            config.model_type or "language_model",
            backend=config.engine_config.strategy,
            model_config=config.model_config,
            engine_config=config.engine_config,
            optimizer_config=config.optimizer_config,
            checkpoint_config=config.checkpoint_config,
        )
        self._register_dispatch_collect_info(
            "train",
            dp_rank=self.engine.get_data_parallel_rank(),
            is_collect=self.engine.is_mp_src_rank_with_outputs(),
        )
        hf_config = getattr(self.engine, "hf_config", None)
        self.flops_counter = None
        if hf_config is not None:
            self.flops_counter = FlopsCounter(hf_config, vocab_head=config.model_type != "value_model")
        self.loss_fn: LossFunction | None = None
        self._nonfinite = NonFiniteGuard(config.optimizer_config)

    # ---- life ----------------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        """Build the model, or build it again from its original weights, with a fresh optimizer and schedule."""
        self.engine.initialize()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_parallel_info(self) -> dict[str, int]:
        size = self.engine.get_data_parallel_size()
        peers = self.world_size // size  # neighbouring ranks with the same rows, each with a part of their tokens
        return {
            "dp_rank": self.engine.get_data_parallel_rank(),
            "dp_size": size,
            "cp_rank": self.rank % peers,
            "cp_size": peers,
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: LossFunction) -> None:
        """Keep the loss of `train_*`; a picklable callable."""
        self.loss_fn = loss_fn

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move state to "cpu" or "device"."""
        self.engine.to(device, model=model, optimizer=optimizer, grad=grad)

    # ---- batches -------------------------------------------------------------------------------------------------

    @register(dispatch_mode=mesh("train"), blocking=False)
    def train_mini_batch(self, data: TensorDict) -> TensorDict | None:
        """Split the rows into mini-batches, one optimizer step each, `epochs` times; the schedule advances once.

        Options in the batch: see `UpdateOptions`, `CallOptions` and `BatchOptions`.

        Returns:
            A batch whose `metrics` (name -> `Metric`) hold the loss function's metrics, `loss`, `grad_norm`, `lr`,
            `skipped_steps`, memory, and `mfu` where the device is known. It has no rows, or with `return_model_output`
            those of `data` with the model's outputs, jagged and on the CPU, from before the one optimizer step.

        Raises:
            ContractError: sizes that do not divide, or `return_model_output` with more than one optimizer step.
        """
        loss_fn = self._loss_fn()
        data = read_names(data)
        options, call = UpdateOptions.pop_from(data), CallOptions.pop_from(data)
        rows = options.rows_per_rank(data.batch_size[0], self.engine.get_data_parallel_size())
        seed = options.seed + self.engine.get_data_parallel_rank()
        one_step = rows == data.batch_size[0] and options.epochs == 1 and not options.dataloader_kwargs.get("shuffle")
        if options.return_model_output and not one_step:
            raise ContractError(
                f"return_model_output needs one optimizer step over rows in their order; {data.batch_size[0]} rows a "
                f"rank in mini-batches of {rows}, {options.epochs} epochs, {options.dataloader_kwargs} are not that"
            )
        steps: list[_Step] = []
        lengths: list[int] = []
        outputs: dict[str, Any] = {}
        started = time.perf_counter()
        with self.engine.train_mode(disable_auto_offload=call.disable_auto_offload):
            for mini in tu.make_iterator(data, rows, options.epochs, seed, options.dataloader_kwargs):
                step, outputs = self._train_step(mini, loss_fn, options)
                steps.append(step)
                lengths.extend(tu.nested_lengths(mini["input_ids"]).tolist())
        metrics = self._gather(steps, lengths, time.perf_counter() - started, forward_only=False)
        if call.update_lr_scheduler is not False:
            metrics["lr"] = Metric(AggregationType.LAST, self.engine.lr_scheduler_step())
        return self._output(metrics, outputs if options.return_model_output else {})

    @register(dispatch_mode=mesh("train"), blocking=False)
    def train_batch(self, data: TensorDict) -> TensorDict | None:
        """One optimizer step over all rows; the schedule advances only with `update_lr_scheduler`."""
        loss_fn = self._loss_fn()
        data = read_names(data)
        options, call = UpdateOptions.pop_from(data), CallOptions.pop_from(data)
        started = time.perf_counter()
        with self.engine.train_mode(disable_auto_offload=call.disable_auto_offload):
            step, _ = self._train_step(data, loss_fn, options)
        lengths = tu.nested_lengths(data["input_ids"]).tolist()
        metrics = self._gather([step], lengths, time.perf_counter() - started, forward_only=False)
        if call.update_lr_scheduler:
            metrics["lr"] = Metric(AggregationType.LAST, self.engine.lr_scheduler_step())
        return self._output(metrics)

    @register(dispatch_mode=mesh("train"), blocking=False)
    def infer_batch(self, data: TensorDict) -> TensorDict | None:
        """Forward only.

        `compute_loss` (default: whether a loss function is set) also evaluates the loss; `no_lora_adapter` runs without
        the adapter.

        Returns:
            The model's outputs, jagged rows on the CPU, and `metrics`.
        """
        data = read_names(data)
        call = CallOptions.pop_from(data)
        loss_fn = None if call.compute_loss is False else self.loss_fn
        adapter = self.engine.disable_adapter() if call.no_lora_adapter else nullcontext()
        started = time.perf_counter()
        with self.engine.eval_mode(disable_auto_offload=call.disable_auto_offload), adapter:
            outputs = self.engine.infer_batch(data, loss_fn)
        steps = [_Step(outputs["metrics"], sum(outputs["loss"]))] if loss_fn is not None else []
        lengths = tu.nested_lengths(data["input_ids"]).tolist()
        metrics = self._gather(steps, lengths, time.perf_counter() - started, forward_only=True)
        return self._output(metrics, outputs["model_output"])

    def _loss_fn(self) -> LossFunction:
        if self.loss_fn is None:
            raise ContractError("no loss function: call set_loss_fn before training")
        return self.loss_fn

    def _train_step(
        self, data: TensorDict, loss_fn: LossFunction, options: UpdateOptions
    ) -> tuple[_Step, dict[str, Any]]:
        outputs = self.engine.train_batch(data, loss_fn)
        grad_norm = outputs["metrics"].pop("grad_norm")

        def dump(event: int) -> Path | None:
            if options.nonfinite_dump_folder is None:
                return None
            folder = Path(f"{options.nonfinite_dump_folder}_{event}")
            max_bytes = 1e6 * self.config.optimizer_config.nonfinite_dump_max_mb
            request = DumpRequest(folder, options.global_steps, max_bytes)
            return write_dump(request, self.engine, self.config, data, loss_fn, grad_norm)

        self._nonfinite.check(grad_norm, dump)
        return _Step(outputs["metrics"], sum(outputs["loss"]), grad_norm), outputs["model_output"]

    def _output(self, metrics: Metrics, model_output: dict[str, Any] | None = None) -> TensorDict | None:
        if not self.engine.is_mp_src_rank_with_outputs():
            return None
        fields = {name: value for name, value in (model_output or {}).items() if value is not None}
        return tu.get_tensordict(fields, {"metrics": metrics})

    # ---- metrics -------------------------------------------------------------------------------------------------

    def _gather(self, steps: list[_Step], lengths: list[int], seconds: float, forward_only: bool) -> Metrics:
        """Metrics of all ranks in one message."""
        counter = self.flops_counter
        flops = 0.0 if counter is None else counter.train_flops(lengths)
        dp_size = self.engine.get_data_parallel_size()
        ranks: list[Any] = [(steps, flops, seconds)]
        if dp_size > 1:
            ranks = [None] * dp_size
            dist.all_gather_object(ranks, (steps, flops, seconds), group=self.engine.get_data_parallel_group())
        metrics: Metrics = {}
        for i in range(len(steps)):
            _merge_step(metrics, [rank[0][i] for rank in ranks])
        if self._nonfinite.in_a_row:
            metrics["skipped_in_a_row"] = Metric(AggregationType.MAX, float(self._nonfinite.in_a_row))
        metrics.update(memory_metrics())
        mfu = self._mfu(sum(rank[1] for rank in ranks), max(rank[2] for rank in ranks), forward_only)
        if mfu is not None:
            metrics["mfu"] = Metric(AggregationType.MEAN, mfu)
        return metrics

    def _mfu(self, flops: float, seconds: float, forward_only: bool) -> float | None:
        """Share of the peak of all devices; None, and so no metric, where model or device is unknown."""
        peak = get_device_flops("B")
        if math.isinf(peak) or flops == 0 or seconds <= 0:
            return None
        return flops / seconds / peak / self.world_size / (3 if forward_only else 1)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> Path | None:
        """Write the state of all ranks into the folder `local_path`; returns the file that a background save ends with
        (see `BaseEngine.save_checkpoint`).
        """
        return self.engine.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Restore what `save_checkpoint` wrote, with any number of ranks."""
        self.engine.load_checkpoint(local_path, hdfs_path, del_local_after_load)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _merge_step(metrics: Metrics, ranks: list[_Step]) -> None:
    """Add one optimizer step, as all ranks saw it, to the running metrics.

    Partial losses carry the factor dp_size for the gradient average, so their sum over ranks is divided by it again;
    the steps of an update then count equally. Everything else keeps its own values and weights.
    """
    for name in dict.fromkeys(name for rank in ranks for name in rank.metrics):
        found = [rank.metrics[name] for rank in ranks if name in rank.metrics]
        if found[0].aggregation is AggregationType.SUM:
            value = sum(metric.aggregate() for metric in found) / len(ranks)
            metrics.setdefault(name, Metric(AggregationType.MEAN)).append(value)
        else:
            for metric in found:
                metrics.setdefault(name, metric.init_list()).extend(metric)
    metrics.setdefault("loss", Metric(AggregationType.MEAN)).append(sum(rank.loss for rank in ranks) / len(ranks))
    norm = ranks[0].grad_norm
    if norm is not None:
        finite = math.isfinite(norm)
        # A skipped step must show as such and must not turn the mean of the others into NaN.
        metrics.setdefault("grad_norm", Metric(AggregationType.MEAN)).append(norm, weight=1.0 if finite else 0.0)
        metrics.setdefault("skipped_steps", Metric(AggregationType.SUM)).append(0.0 if finite else 1.0)


def memory_metrics() -> Metrics:
    """Peak device memory of this process and used memory of the host, GiB."""
    device = get_torch_device()
    values = {
        "perf/max_memory_allocated_gb": device.max_memory_allocated(),
        "perf/max_memory_reserved_gb": device.max_memory_reserved(),
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used,
    }
    return {name: Metric(AggregationType.MAX, value / 2**30) for name, value in values.items()}
