"""What every training engine offers, whatever shards the model.

    with engine.train_mode():
        out = engine.train_batch(data, loss_function)      # one optimizer step over one mini-batch
    engine.lr_scheduler_step()                             # once per update, not per optimizer step

Invariants
    - The gradient of a mini-batch does not depend on how it was cut into micro-batches, packed, padded or spread over
      ranks: losses are local sums over counts of the whole mini-batch on all data-parallel ranks.
    - Methods marked *collective* must be called by all ranks of the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

# loss_function(model_output=, data=, dp_group=) -> (scalar loss, metrics). `model_output` holds jagged fields that line
# up with `responses`; `data` is the micro-batch with batch_num_tokens, global_batch_size, dp_size of its mini-batch.
LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]


class BaseEngine(ABC):
    """A model, its optimizer and its schedule on this rank.

    Args:
        model_config: which model (`HFModelConfig`).
        engine_config: how it is sharded and computed.
        optimizer_config: optimizer and schedule; unused when `engine_config.forward_only`.
        checkpoint_config: what a checkpoint holds.
    """

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any = None, checkpoint_config: Any = None
    ) -> None:
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = optimizer_config
        self.checkpoint_config = checkpoint_config
        self.mode: str | None = None

    # ---- life ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def initialize(self) -> None:
        """Build, or build again from the original weights, model, optimizer and schedule. *Collective.*"""

    @abstractmethod
    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move state to "cpu" or "device"; gradients move with the model."""

    @property
    @abstractmethod
    def is_param_offload_enabled(self) -> bool:
        """Whether parameters wait on the CPU between modes."""

    @property
    @abstractmethod
    def is_optimizer_offload_enabled(self) -> bool:
        """Whether optimizer state waits on the CPU between modes."""

    def train_mode(self, **options: Any) -> BaseEngineCtx:
        """Context of gradient computation; nests."""
        return BaseEngineCtx(self, "train", **options)

    def eval_mode(self, **options: Any) -> BaseEngineCtx:
        """Context of inference; nests."""
        return BaseEngineCtx(self, "eval", **options)

    @abstractmethod
    def set_module_mode(self, mode: str | None) -> None:
        """Switch the module to "train" or "eval"; None: the outermost mode ended."""

    # ---- one batch -----------------------------------------------------------------------------------------------

    @abstractmethod
    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run all micro-batches of `data`. *Collective.*

        Returns:
            `model_output` (jagged fields in row order), `loss` (one float per micro-batch), `metrics` (name -> Metric).
        """

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Drop gradients."""

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clip and step; returns the gradient norm before clipping. A non-finite norm skips the step. *Collective.*"""

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the schedule; returns the new learning rate of the first group."""

    def train_batch(self, data: TensorDict, loss_function: LossFunction) -> dict[str, Any]:
        """One optimizer step over one mini-batch; adds `grad_norm` to the metrics. *Collective.*"""
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)
        outputs["metrics"]["grad_norm"] = self.optimizer_step()
        return outputs

    def infer_batch(self, data: TensorDict, loss_function: LossFunction | None = None) -> dict[str, Any]:
        """Forward only; with a loss function its values and metrics too. *Collective.*"""
        with torch.no_grad():
            return self.forward_backward_batch(data, loss_function, forward_only=True)

    # ---- weights and checkpoints ---------------------------------------------------------------------------------

    @abstractmethod
    def get_per_tensor_param(self, **options: Any) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """((name, full tensor) one after the other under Hugging Face names, adapter config or None). *Collective*:
        every rank must run the iterator to its end.
        """

    @abstractmethod
    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **options: Any,
    ) -> Path | None:
        """Write this engine's state into the folder `local_path`. *Collective.*

        Returns:
            None: it is written. Else it is being written, and this file appears when it is (see
            `rlflow.checkpoint.background`).
        """

    @abstractmethod
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False, **options: Any
    ) -> None:
        """Restore the state of `save_checkpoint`, written by any number of ranks. *Collective.*"""

    # ---- place in the group --------------------------------------------------------------------------------------

    @abstractmethod
    def get_data_parallel_rank(self) -> int:
        """Which part of a batch this rank computes."""

    @abstractmethod
    def get_data_parallel_size(self) -> int:
        """Into how many parts a batch is split."""

    @abstractmethod
    def get_data_parallel_group(self) -> Any:
        """Process group of the ranks that compute different parts."""

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank's outputs are collected."""
        return True

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Compute without the adapter, where the model has one."""
        return nullcontext()


class BaseEngineCtx:
    """A mode of an engine, entered and left around batches.

    Modes nest (an update holds `train` around its mini-batches): the engine returns to the mode that it had before, and
    only the outermost context moves offloaded state.

    Args:
        engine: whose mode.
        mode: "train" or "eval".
        disable_auto_offload: leave state where it is.
        zero_grad_on_exit: drop gradients at the end of `train`; they are always dropped when an exception passes.
    """

    def __init__(
        self, engine: BaseEngine, mode: str, disable_auto_offload: bool = False, zero_grad_on_exit: bool = True
    ) -> None:
        self.engine = engine
        self.mode = mode
        self.disable_auto_offload = disable_auto_offload
        self.zero_grad_on_exit = zero_grad_on_exit
        self._outer: str | None = None

    def __enter__(self) -> BaseEngineCtx:
        self._outer = self.engine.mode
        self.engine.mode = self.mode
        self._move("device")
        self.engine.set_module_mode(self.mode)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.mode == "train" and self._outer != "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        self.engine.set_module_mode(self._outer)
        self._move("cpu")
        self.engine.mode = self._outer

    def _move(self, device: str) -> None:
        if self.disable_auto_offload or self._outer is not None:
            return
        train = self.mode == "train"
        params = self.engine.is_param_offload_enabled
        optimizer = self.engine.is_optimizer_offload_enabled and train
        if params or optimizer:
            self.engine.to(device, model=params, optimizer=optimizer, grad=params and train)


def __getattr__(name: str) -> Any:
    if name == "EngineRegistry":  # its home in the reference
        from rlflow.workers.engine.registry import EngineRegistry

        return EngineRegistry
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
