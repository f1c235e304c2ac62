"""FSDP engines: a model sharded by torch's fully_shard, over NCCL on GPUs and gloo on CPUs.

    FSDPEngine                everything but what the model computes
    FSDPEngineWithLMHead      a policy: log-probs and entropies
    FSDPEngineWithValueHead   a critic: values

Invariants
    - Weights, gradients and optimizer state are sharded over all ranks of the FSDP mesh, also when there is only one.
    - Gradients are reduced once per mini-batch, in the backward of its last micro-batch; until then they add up locally
      in the reduction dtype (`defer_fsdp_grad_sync=false`: reduced and added up sharded after every micro-batch).
    - Which ranks share shards, rows and tokens: mesh.py.
    - Outputs are fp32 and exist at response tokens only.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlflow.checkpoint.background import CheckpointWriter
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.device import get_device, manual_seed
from rlflow.utils.errors import ConfigError, ContractError
from rlflow.utils.flops_counter import linear_work_per_token
from rlflow.utils.metric import Metric, merge_metrics
from rlflow.workers.engine.base import BaseEngine, LossFunction
from rlflow.workers.engine.batching import (
    BatchOptions,
    LossCounts,
    MicroBatch,
    count_loss_tokens,
    prepare_micro_batches,
    restore_rows,
)
from rlflow.workers.engine.fsdp import checkpoint, export
from rlflow.workers.engine.fsdp.families import has_dropout
from rlflow.workers.engine.fsdp.inputs import ModelInputs, build_inputs, empty_inputs, prompt_keys, response_lengths
from rlflow.workers.engine.fsdp.log_prob import TokenStats
from rlflow.workers.engine.fsdp.lora import adapters_off
from rlflow.workers.engine.fsdp.mesh import build_places
from rlflow.workers.engine.fsdp.model import (
    PackedModel,
    PolicyModel,
    build_module,
    load_causal_lm,
    load_hf_config,
)
from rlflow.workers.engine.fsdp.offload import (
    move_state,
    moves_optimizer,
    moves_parameters,
    say_where_nothing_offloads,
)
from rlflow.workers.engine.fsdp.optim import build_lr_scheduler, build_optimizer, clip_grad_norm
from rlflow.workers.engine.fsdp.sharding import offloads_by_policy, reshard
from rlflow.workers.engine.fsdp.ulysses import check_heads, gather_predictions, split_sequence
from rlflow.workers.engine.fsdp.value_model import ValueModel, load_value_config, load_value_model
from rlflow.workers.engine.options import batch_defaults
from rlflow.workers.engine.process import ensure_process_group
from rlflow.workers.engine.registry import EngineRegistry

logger = logging.getLogger(__name__)


class FSDPEngine(BaseEngine):
    """Sharding, optimizer, gradients, checkpoints; what a forward computes is the subclass's.

    Attributes (after `initialize`):
        module: the sharded model.
        optimizer, lr_scheduler: None when `forward_only`.
        hf_config: the transformers config, known before `initialize`.
    """

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any = None, checkpoint_config: Any = None
    ) -> None:
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        if optimizer_config is None and not engine_config.forward_only:
            raise ConfigError("an engine that trains needs an optimizer_config; set forward_only for a frozen model")
        ensure_process_group()
        self.device = get_device()
        self.ranks = build_places(engine_config, self.device.type)
        self.hf_config = self.load_config()
        text = self.hf_config.get_text_config()
        check_heads(text, self.ranks.sp_size)
        say_where_nothing_offloads(engine_config, self.device.type)
        self._linear_work = linear_work_per_token(self.hf_config)
        # A prompt that stands for several rows would draw its dropout once instead of once a row.
        self._may_share = not has_dropout(text)
        self.module: PackedModel
        self.optimizer: Optimizer | None = None
        self.lr_scheduler: LRScheduler | None = None
        self._writer = CheckpointWriter(in_background=bool((checkpoint_config or {}).get("async_save")))

    # ---- what a subclass says ------------------------------------------------------------------------------------

    def load_config(self) -> Any:
        """The transformers config of the model."""
        return load_hf_config(self.model_config)

    def load_model(self, dtype: torch.dtype, with_weights: bool) -> PackedModel:
        """The model on the CPU; without weights its parameters are uninitialised memory."""
        raise NotImplementedError

    def run_model(self, inputs: ModelInputs, options: BatchOptions) -> dict[str, Tensor]:
        """Outputs by name, fp32 [N] each, one entry a prediction."""
        raise NotImplementedError

    # ---- life ----------------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Build, or build again from the original weights, model, optimizer and schedule. *Collective.*"""
        seed = int(self.engine_config.get("seed", 42))
        manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self.module = build_module(
            self.load_model, self.model_config, self.engine_config, self.ranks.shards, self.device
        )
        self.module.eval()
        if not self.engine_config.forward_only:
            self.optimizer = build_optimizer(self.module.trained_parameters(), self.optimizer_config)
            self.lr_scheduler = build_lr_scheduler(self.optimizer, self.optimizer_config)
        if self.is_param_offload_enabled or self.is_optimizer_offload_enabled:
            self.to("cpu", model=self.is_param_offload_enabled, optimizer=self.is_optimizer_offload_enabled, grad=False)

    @property
    def is_param_offload_enabled(self) -> bool:
        """Whether parameters wait on the CPU between modes (never on a CPU device)."""
        return moves_parameters(self.engine_config, self.device.type)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Whether optimizer state waits on the CPU between modes (never on a CPU device)."""
        return moves_optimizer(self.engine_config, self.device.type)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move state to "cpu" or "device"; gradients move with the model."""
        if device not in ("cpu", "device"):
            raise ContractError(f"to() takes 'cpu' or 'device', got {device!r}")
        if grad and not model:
            raise ContractError("gradients live with their parameters; to(grad=True) needs model=True")
        if self.device.type != "cpu" and not offloads_by_policy(self.engine_config, self.device.type):
            target = torch.device("cpu") if device == "cpu" else self.device
            move_state(self.module if model else None, self.optimizer if optimizer else None, target)

    def set_module_mode(self, mode: str | None) -> None:
        self.module.train(mode == "train")
        if mode != "train":
            reshard(self.module)

    # ---- place in the group --------------------------------------------------------------------------------------

    def get_data_parallel_rank(self) -> int:
        return self.ranks.dp_rank

    def get_data_parallel_size(self) -> int:
        return self.ranks.dp_size

    def get_data_parallel_group(self) -> Any:
        return self.ranks.dp_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self.ranks.sp_rank == 0

    # ---- one batch -----------------------------------------------------------------------------------------------

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run all micro-batches; see `BaseEngine`. Without a loss function only a forward is possible."""
        if loss_function is None and not forward_only:
            raise ContractError("a backward needs a loss function; call set_loss_fn first")
        if self.engine_config.forward_only and not forward_only:
            raise ContractError("this engine is forward_only: it has no gradients and no optimizer")
        options = BatchOptions.from_batch(data, batch_defaults(self.engine_config, self.device.type, forward_only))
        dp_size = self.get_data_parallel_size()
        counts = None
        if loss_function is not None:
            counts = count_loss_tokens(data, self.get_data_parallel_group(), dp_size, self.device)
        micro_batches = self.split(data, options)
        # The gradient is reduced with the last micro-batch only, or with each of them.
        defers = isinstance(self.module, FSDPModule) and not forward_only and self.engine_config.defer_fsdp_grad_sync
        outputs: list[tuple[list[int], dict[str, Tensor], Tensor]] = []
        losses: list[float] = []
        metrics: dict[str, Metric] = {}
        for i, micro in enumerate(micro_batches):
            if defers:
                self.module.set_requires_gradient_sync(i == len(micro_batches) - 1)  # type: ignore[operator]
            loss, output, lengths, new = self.forward_step(micro, options, loss_function, counts)
            if not forward_only:
                loss.backward()
            if micro.data is not None:
                outputs.append((micro.rows, output, lengths))
                losses.append(float(loss.detach()))
                merge_metrics(metrics, new)
        if self.module.routers is not None and not forward_only:
            merge_metrics(metrics, self.module.routers.metrics(self.device))
        names = list(outputs[0][1]) if outputs else []
        restored = {name: restore_rows([(rows, out[name], n) for rows, out, n in outputs]) for name in names}
        return {"model_output": restored, "loss": losses, "metrics": metrics}

    def split(self, data: TensorDict, options: BatchOptions) -> list[MicroBatch]:
        """The micro-batches of a batch, equally many on all ranks. *Collective.*"""
        total = tu.nested_lengths(tu.check_jagged(data["input_ids"], "input_ids"))
        prompts = (total - response_lengths(data).to(total.device)).tolist()
        return prepare_micro_batches(
            data,
            options,
            dp_group=self.get_data_parallel_group(),
            prompt_keys=prompt_keys if self._may_share else None,
            prompt_lengths=prompts,
            linear_work=self._linear_work,
            sp_size=self.ranks.sp_size,
        )

    def forward_step(
        self, micro: MicroBatch, options: BatchOptions, loss_function: LossFunction | None, counts: LossCounts | None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor, dict[str, Any]]:
        """(scalar loss, detached outputs [sum(lengths)] on the CPU, lengths [rows], metrics) of one micro-batch."""
        if micro.data is None:
            outputs = self._run(empty_inputs(self.device, self.ranks.sp_size), options)
            return next(iter(outputs.values())).sum(), {}, torch.zeros(0, dtype=torch.int64), {}
        inputs = self._inputs(micro, options)
        outputs = self._run(inputs, options)
        loss: Tensor = torch.zeros((), device=self.device)
        metrics: dict[str, Any] = {}
        if loss_function is not None and counts is not None:
            model_output = {name: tu.nested_from_values(v, inputs.lengths) for name, v in outputs.items()}
            loss, metrics = loss_function(
                model_output=model_output,
                data=counts.beside(micro.data, self.device),
                dp_group=self.get_data_parallel_group(),
            )
        return loss, {name: value.detach().cpu() for name, value in outputs.items()}, inputs.lengths, metrics

    def _run(self, inputs: ModelInputs, options: BatchOptions) -> dict[str, Tensor]:
        """Outputs of all predictions, of which this rank makes those of its tokens."""
        if self.ranks.sp_group is None:
            return self.run_model(inputs, options)
        part = split_sequence(inputs, self.ranks.sp_group)
        assert part.sequence is not None
        return {name: gather_predictions(v, part.sequence) for name, v in self.run_model(part, options).items()}

    def _inputs(self, micro: MicroBatch, options: BatchOptions) -> ModelInputs:
        temperature = options.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature[torch.tensor(micro.rows)] if temperature.dim() else float(temperature)
        assert micro.data is not None
        return build_inputs(
            micro.data,
            temperature=temperature,
            device=self.device,
            packed=options.use_remove_padding,
            share_prompts=options.share_prompts and self._may_share,
            multiple_of=self.ranks.sp_size,
        )

    def optimizer_zero_grad(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def optimizer_step(self) -> float:
        """Clip and step; see `BaseEngine`."""
        if self.optimizer is None:
            raise ContractError("this engine is forward_only: it has no optimizer")
        norm = clip_grad_norm(self.module.parameters(), self.optimizer_config.clip_grad)
        if math.isfinite(norm):
            self.optimizer.step()
        else:
            # All ranks see the same norm, so all of them skip; what becomes of it is the caller's (NonFiniteGuard).
            logger.info("gradient norm is %s: this optimizer step is skipped", norm)
            self.optimizer_zero_grad()
        return norm

    def lr_scheduler_step(self) -> float:
        if self.lr_scheduler is None:
            raise ContractError("this engine is forward_only: it has no schedule")
        self.lr_scheduler.step()
        return float(self.lr_scheduler.get_last_lr()[0])

    # ---- weights and checkpoints ---------------------------------------------------------------------------------

    def get_per_tensor_param(
        self, *, base_sync_done: bool | None = None, **options: Any
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """((name, full tensor), ...) and the adapter's config; see `BaseEngine`. *Collective.*

        Args:
            base_sync_done: None: all weights under Hugging Face names, adapters merged in, and no config. With an
                adapter, False: the weights without it; True: the adapter only, under PEFT's names.
        """
        if base_sync_done is None:
            return export.iter_full_tensors(self.module), None
        if base_sync_done:
            return export.iter_adapter_tensors(self.module), export.adapter_facts(self.module)
        return export.iter_full_tensors(self.module, merged=False), export.adapter_facts(self.module)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **options: Any,
    ) -> Path | None:
        """Write into `local_path`; atomicity and retention are the caller's (see `rlflow.checkpoint`). *Collective.*

        With `checkpoint.async_save` state goes into memory here and to the disk in the background; the returned file
        says when. A Hugging Face folder is written at once.
        """
        if hdfs_path is not None:
            raise ConfigError("copies to a remote file system (hdfs_path) are not in this version; set it to null")
        contents = self._contents("save_contents")
        self.module.saves_trained_only = bool(self.checkpoint_config and self.checkpoint_config.save_lora_only)
        folder = Path(local_path)
        with self.eval_mode():
            export.save_hf_folder(
                self.module, self.model_config, folder / "huggingface", with_weights="hf_model" in contents
            )
            state = (self.module, self.optimizer, self.lr_scheduler)
            files = checkpoint.state_files(*state, folder, contents=contents, global_step=global_step)
            # Last: no thread writes into a folder that an error made the caller give up.
            return self._writer.write(files, folder, dist.get_rank())

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False, **options: Any
    ) -> None:
        """Restore from `local_path`, written by any number of ranks. *Collective.*"""
        if hdfs_path is not None or del_local_after_load:
            raise ConfigError("load_checkpoint reads local folders and leaves them in place in this version")
        contents = self._contents("load_contents")
        with self.eval_mode():
            checkpoint.load_state(self.module, self.optimizer, self.lr_scheduler, Path(local_path), contents=contents)

    def disable_adapter(self) -> AbstractContextManager[None]:
        return nullcontext() if self.module.adapter_config is None else adapters_off(self.module.hf_model)

    def _contents(self, key: str) -> list[str]:
        default = ["model", "optimizer", "extra"]
        return list(self.checkpoint_config[key]) if self.checkpoint_config is not None else default


@EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device=["cuda", "cpu"])
class FSDPEngineWithLMHead(FSDPEngine):
    """Outputs of a language model: `log_probs`, with `calculate_entropy` also `entropy`, with
    `calculate_sum_pi_squared` also `sum_pi_squared`.
    """

    def load_model(self, dtype: torch.dtype, with_weights: bool) -> PackedModel:
        causal_lm = load_causal_lm(self.model_config, self.hf_config, dtype, with_weights)
        config = self.engine_config
        return PolicyModel(
            causal_lm,
            config.entropy_from_logits_chunk_size,
            chunked=config.entropy_from_logits_with_chunking,
            recompute=config.entropy_checkpointing,
            compiled=config.use_torch_compile,
            fused=bool(self.model_config.get("use_fused_kernels", False)),
        )

    def run_model(self, inputs: ModelInputs, options: BatchOptions) -> dict[str, Tensor]:
        stats: TokenStats = self.module(
            inputs,
            with_entropy=options.calculate_entropy,
            with_sum_pi_squared=options.calculate_sum_pi_squared,
        )
        return {name: value for name, value in stats._asdict().items() if value is not None}


@EngineRegistry.register("value_model", ["fsdp", "fsdp2"], device=["cuda", "cpu"])
class FSDPEngineWithValueHead(FSDPEngine):
    """Output of a critic: `values`, each at the position that predicts its token."""

    def load_config(self) -> Any:
        return load_value_config(self.model_config)

    def load_model(self, dtype: torch.dtype, with_weights: bool) -> PackedModel:
        seed = int(self.engine_config.get("seed", 42))
        return ValueModel(load_value_model(self.model_config, self.hf_config, dtype, with_weights, seed))

    def run_model(self, inputs: ModelInputs, options: BatchOptions) -> dict[str, Tensor]:
        return {"values": self.module(inputs)}
