"""The RPC surface of training: what a controller may call on a group of worker processes.

    TrainingWorker            one model (in `training_worker.py`)
    CriticWorker              the value model, a `TrainingWorker` (in `critic_worker.py`)
    ActorRolloutRefWorker     the policy, its frozen reference (itself without its adapter, where it trains one) and the
                              sender of its weights, in one process

Invariants
    - Every method is called on all ranks of a group; its collectives meet.
    - A call reads and writes the fields it declares, and nothing else.
    - The configuration is read, never changed: `init_model` can be called again.
"""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tensordict import TensorDict

from rlflow.checkpoint_engine.base import WeightReceipt
from rlflow.checkpoint_engine.canary import Canary
from rlflow.config import (
    FSDPActorConfig,
    HFModelConfig,
    RefConfig,
    RolloutConfig,
    TrainingWorkerConfig,
    omega_conf_to_dataclass,
)
from rlflow.single_controller.base import Dispatch, Worker, WorkerContext, mesh, register
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.device import get_torch_device
from rlflow.utils.errors import ConfigError, ContractError, WeightSyncError
from rlflow.workers.engine.base import LossFunction
from rlflow.workers.engine.process import prepare_process
from rlflow.workers.losses import ppo_loss
from rlflow.workers.training_worker import TrainingWorker
from rlflow.workers.weight_export import WeightExport, compute_canary

__all__ = ["ActorRolloutRefWorker", "TrainingWorker", "TrainingWorkerConfig"]

# Outputs of the model under the names of the queue's fields.
OLD_LOG_PROB_FIELDS = {"log_probs": "old_log_probs", "entropy": "entropy"}
ROLES = ("actor", "rollout", "ref", "actor_rollout", "actor_rollout_ref")


class ActorRolloutRefWorker(Worker):
    """The policy of a run: trained here, frozen here as its own reference, sent from here to the rollout servers.

    Args:
        config: the resolved `actor_rollout_ref` node.
        role: which parts this process has, one of `ROLES`.
        context: place in the group; None: from the environment.
    """

    actor_worker_cls = TrainingWorker
    ref_worker_cls = TrainingWorker

    def __init__(self, config: Any, role: str, *, context: WorkerContext | None = None, **_: Any) -> None:
        super().__init__(context=context)
        if role not in ROLES:
            raise ConfigError(f"role={role!r} is unknown; choose from {', '.join(ROLES)}")
        self.config = config
        self.role = role
        self._is_actor = role in ("actor", "actor_rollout", "actor_rollout_ref")
        self._is_rollout = role in ("rollout", "actor_rollout", "actor_rollout_ref")
        self._is_ref = role in ("ref", "actor_rollout_ref")
        self.actor: TrainingWorker | None = None
        self.ref: TrainingWorker | None = None
        self.weights: WeightExport | None = None

    # ---- building ------------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the models of this role and register the meshes "actor" and "ref"."""
        prepare_process(self.context)
        self.model_config = omega_conf_to_dataclass(self.config.model, HFModelConfig)
        self.rollout_config = omega_conf_to_dataclass(self.config.rollout, RolloutConfig)
        if self._is_ref:
            self.ref = self._build_ref()
            self.set_dispatch_collect("ref", **self.ref.get_dispatch_collect("train"))
        if self._is_actor:
            self.actor = self._build_actor()
            self.set_dispatch_collect("actor", **self.actor.get_dispatch_collect("train"))
            if self.ref is None and self.model_config.uses_lora:
                self.set_dispatch_collect("ref", **self.actor.get_dispatch_collect("train"))
        if self._is_actor and self._is_rollout:
            self.weights = WeightExport(self.rollout_config, self.model_config, self.rank, self.world_size)
        get_torch_device().empty_cache()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_parallel_info(self) -> dict[str, int]:
        inner = self.actor or self.ref
        return super().get_parallel_info() if inner is None else inner.get_parallel_info()

    def _build_ref(self) -> TrainingWorker:
        config = omega_conf_to_dataclass(self.config.ref, RefConfig)
        engine = config.fsdp_config
        engine.forward_only = True
        engine.use_remove_padding = self.model_config.use_remove_padding
        engine.use_dynamic_bsz = config.log_prob_use_dynamic_bsz
        engine.infer_max_token_len_per_gpu = config.log_prob_max_token_len_per_gpu
        engine.infer_micro_batch_size_per_gpu = config.log_prob_micro_batch_size_per_gpu
        worker = self.ref_worker_cls(
            TrainingWorkerConfig(model_config=self.model_config, engine_config=engine), context=self.context
        )
        worker.reset()
        return worker

    def _build_actor(self) -> TrainingWorker:
        config = omega_conf_to_dataclass(self.config.actor, FSDPActorConfig)
        engine = config.fsdp_config
        engine.use_remove_padding = self.model_config.use_remove_padding
        engine.use_dynamic_bsz = config.use_dynamic_bsz
        engine.max_token_len_per_gpu = config.ppo_max_token_len_per_gpu
        engine.micro_batch_size_per_gpu = config.ppo_micro_batch_size_per_gpu
        engine.infer_max_token_len_per_gpu = self.rollout_config.log_prob_max_token_len_per_gpu
        engine.infer_micro_batch_size_per_gpu = self.rollout_config.log_prob_micro_batch_size_per_gpu
        worker = self.actor_worker_cls(
            TrainingWorkerConfig(
                model_config=self.model_config,
                engine_config=engine,
                optimizer_config=config.optim,
                checkpoint_config=config.checkpoint,
            ),
            context=self.context,
        )
        worker.reset()
        worker.set_loss_fn(partial(ppo_loss, config=self._loss_config(config)))
        return worker

    def _loss_config(self, config: FSDPActorConfig) -> FSDPActorConfig:
        if config.loss_agg_mode == "seq-mean-token-sum-norm" and config.loss_scale_factor is None:
            # The padded width of a micro-batch would make the scale depend on the split.
            return dataclasses.replace(config, loss_scale_factor=float(self.rollout_config.response_length))
        return config

    # ---- the step ------------------------------------------------------------------------------------------------

    @register(
        dispatch_mode=mesh("actor"),
        reads=("input_ids", "responses"),
        optional_reads=("position_ids",),
        writes=("old_log_probs", "entropy"),
        optional_writes=("sum_pi_squared",),
    )
    def compute_log_prob(self, data: TensorDict) -> TensorDict | None:
        """Log-probabilities of the sampled tokens under the current policy.

        Returns jagged rows aligned with `responses`: `old_log_probs` fp32 [N, j], `entropy` fp32 [N, j] (nats), and
        where the batch says `calculate_sum_pi_squared` also `sum_pi_squared` fp32 [N, j], the sum of the squared
        probabilities of each token's distribution.
        """
        options = {"use_dynamic_bsz": self.rollout_config.log_prob_use_dynamic_bsz, "calculate_entropy": True}
        names = dict(OLD_LOG_PROB_FIELDS)
        if tu.get(data, "calculate_sum_pi_squared", False):
            names["sum_pi_squared"] = "sum_pi_squared"
        return _log_prob_rows(self._actor(), data, options, names)

    @register(
        dispatch_mode=mesh("ref"),
        reads=("input_ids", "responses"),
        optional_reads=("position_ids",),
        writes=("ref_log_prob",),
    )
    def compute_ref_log_prob(self, data: TensorDict) -> TensorDict | None:
        """The same under the reference policy: `ref_log_prob` fp32 [N, j].

        A policy that trains an adapter is its own reference: with the adapter off it is what training started from.
        """
        options: dict[str, Any] = {"calculate_entropy": False}
        worker = self.ref
        if worker is None and self.actor is not None and self.model_config.uses_lora:
            worker = self.actor
            options |= {"no_lora_adapter": True, "use_dynamic_bsz": self.rollout_config.log_prob_use_dynamic_bsz}
        if worker is None:
            raise ContractError(f"a worker of role {self.role!r} has no reference policy, or init_model was not called")
        return _log_prob_rows(worker, data, options, {"log_probs": "ref_log_prob"})

    @register(
        dispatch_mode=mesh("actor"),
        reads=("input_ids", "responses", "response_mask", "advantages"),
        optional_reads=("position_ids", "old_log_probs", "ref_log_prob", "rollout_is_weights"),
        optional_writes=("old_log_probs", "entropy"),
    )
    def update_actor(self, data: TensorDict) -> TensorDict | None:
        """Train on the rows; see `TrainingWorker.train_mini_batch`. Returns `metrics`.

        With the option `fuse_old_log_prob` the rows bring no `old_log_probs`: those of the update's own forward are
        the old ones, which is exact for a single optimizer step. They are returned as `compute_log_prob` does.
        """
        data = data.copy()
        if not tu.get(data, "fuse_old_log_prob", False):
            return self._actor().train_mini_batch(data)
        if "old_log_probs" in data.keys():
            data.pop("old_log_probs")
        tu.assign_non_tensor_whole(data, {"return_model_output": True, "calculate_entropy": True})
        return _renamed(self._actor().train_mini_batch(data), OLD_LOG_PROB_FIELDS)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: LossFunction) -> None:
        """Replace the policy's loss."""
        self._actor().set_loss_fn(loss_fn)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move the policy's state to "cpu" or "device"."""
        self._actor().to(device, model=model, optimizer=optimizer, grad=grad)

    def _actor(self) -> TrainingWorker:
        if self.actor is None:
            raise ContractError(f"a worker of role {self.role!r} has no actor, or init_model was not called")
        return self.actor

    # ---- weights to the rollout servers --------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def bind_rollout(self, server_handles: list[Any]) -> None:
        """Say which server this rank feeds: element i belongs to rank i, None for a rank that feeds none."""
        if len(server_handles) != self.world_size:
            raise ContractError(f"bind_rollout got {len(server_handles)} handles for {self.world_size} ranks")
        leaders = [rank for rank, handle in enumerate(server_handles) if handle is not None]
        size = self.world_size // max(1, len(leaders))
        even = leaders == list(range(0, self.world_size, size))
        self._weights().bind(server_handles[self.rank], size if even else 1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(
        self,
        global_steps: int | None = None,
        mode: str = "auto",
        ranks: list[int] | None = None,
        base_sync: bool | None = None,
    ) -> WeightReceipt | WeightSyncError | None:
        """Send the policy's weights as version `global_steps`.

        Args:
            mode: "naive": every rank feeds the server on its node. A name of a checkpoint engine: through it. "auto":
                `rollout.checkpoint_engine.backend`.
            ranks: naive: only these ranks send, the others gather with them; None: all that have a server.
            base_sync: naive, with an adapter: whether the base weights go first; None: unless they went before.

        Returns:
            The receipt that both ends agree on, or what went wrong at this rank's server: returned, not raised, so
            that the call tells about all ranks. None on a rank that sends to nobody.
        """
        engine, export = self._actor().engine, self._weights()
        mode = str(self.rollout_config.checkpoint_engine.backend) if mode == "auto" else mode
        version = int(global_steps or 0)
        try:
            with engine.eval_mode():
                if mode == "naive":
                    return await export.send(engine, version, ranks, base_sync)
                return await export.send_through_engine(engine, version, mode)
        except WeightSyncError as error:
            return error

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    async def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """`prepare`, `init_process_group` or `finalize` of the trainer's end of the configured checkpoint engine."""
        return await asyncio.to_thread(getattr(self._weights().checkpoint_engine, method), *args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def canary(self) -> tuple[Canary, str]:
        """A fixed prompt with its log-probs under the present policy, and the type of the weights on the wire.

        *Collective.*
        """
        return compute_canary(self._actor()), str(self.rollout_config.dtype)

    def _weights(self) -> WeightExport:
        if self.weights is None:
            raise ContractError(f"a worker of role {self.role!r} sends no weights")
        return self.weights

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> Path | None:
        """Write the policy's state into the folder `local_path`; see `TrainingWorker.save_checkpoint`."""
        return self._actor().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Restore the policy's state."""
        self._actor().load_checkpoint(local_path, hdfs_path, del_local_after_load)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _log_prob_rows(
    worker: TrainingWorker, data: TensorDict, options: dict[str, Any], names: dict[str, str]
) -> TensorDict | None:
    """Inference without a loss; outputs under the names of the queue's fields."""
    data = data.copy()
    tu.assign_non_tensor_whole(data, options | {"compute_loss": False})
    output = _renamed(worker.infer_batch(data), names)
    if output is not None:
        tu.pop(output, "metrics")
    return output


def _renamed(output: TensorDict | None, names: dict[str, str]) -> TensorDict | None:
    """Outputs of a model under the names of the queue's fields, with the metrics."""
    if output is None:
        return None
    fields = {field: output[name] for name, field in names.items()}
    return tu.get_tensordict(fields, {"metrics": tu.get(output, "metrics")})
