"""A trainer rank's side of a weight sync: what is sent, in which type, to whom.

    full weights             W + s B A where an adapter is trained, in `rollout.dtype`
    adapter                  `model.lora.merge=false` and an engine that serves adapters: the base weights once, then
                             only A and B of every version

Invariant: all ranks export the same sequence of tensors in one call, whoever of them sends; gathering is collective.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rlflow.checkpoint_engine.base import CheckpointEngine, build_engine
from rlflow.checkpoint_engine.canary import Canary, canary_tokens
from rlflow.checkpoint_engine.receipt import WeightReceipt
from rlflow.checkpoint_engine.shared_memory import SharedMemorySender
from rlflow.checkpoint_engine.tally import Tally
from rlflow.checkpoint_engine.wire import WireTypes
from rlflow.config import HFModelConfig, RolloutConfig
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ConfigError, ContractError
from rlflow.workers.engine.base import BaseEngine
from rlflow.workers.rollout.capabilities import capabilities_of
from rlflow.workers.training_worker import TrainingWorker

logger = logging.getLogger(__name__)


class WeightExport:
    """See the module.

    Args:
        rank, world_size: of this process in the trainer's group.
    """

    def __init__(self, rollout: RolloutConfig, model: HFModelConfig, rank: int, world_size: int) -> None:
        self._rollout, self._rank = rollout, rank
        self._types = WireTypes.from_config(rollout)
        self._sender = SharedMemorySender(rollout, rank, world_size)
        self._as_adapter = model.uses_lora and not model.lora.merge and capabilities_of(rollout.name).lora_adapters
        self._base_done = False
        self._server: Any = None
        self._replica_size = 1
        self._engine: CheckpointEngine | None = None
        self._engine_name = str(rollout.checkpoint_engine.backend)

    def bind(self, server: Any, replica_size: int = 1) -> None:
        """Feed this server from now on; None: feed none. `replica_size` ranks, the feeding one first, share a server
        and the gathering of its weights.
        """
        self._server, self._replica_size = server, replica_size
        self._base_done = False

    @property
    def checkpoint_engine(self) -> CheckpointEngine:
        """The trainer's end of the configured checkpoint engine."""
        if self._engine is None:
            self._engine = build_engine(self._rollout, is_master=self._rank == 0)
        return self._engine

    async def send(
        self, engine: BaseEngine, version: int, ranks: list[int] | None, base_sync: bool | None
    ) -> WeightReceipt | None:
        """Feed the server of this rank; see `ActorRolloutRefWorker.update_weights`. *Collective.*"""
        server = self._server if ranks is None or self._rank in ranks else None
        if not self._as_adapter:
            return await self._send_full(engine, server, version)
        preloaded = self._rollout.load_format != "dummy"
        needs_base = not preloaded and (not self._base_done if base_sync is None else base_sync)
        # Set before anything can fail: all ranks must agree on it, and the controller asks again after a failure.
        self._base_done = True
        base_bytes = 0
        failed: Exception | None = None
        if needs_base:
            params, _ = engine.get_per_tensor_param(base_sync_done=False)
            try:
                base = await self._sender.send(params, server, version)
                base_bytes = 0 if base is None else base.total_bytes
            except Exception as error:  # noqa: BLE001 - the other ranks gather the adapter next, and so must this one
                failed, server = error, None
        params, lora = engine.get_per_tensor_param(base_sync_done=True)
        receipt = await self._sender.send(params, server, version, lora)
        if failed is not None:
            raise failed
        if receipt is None:
            return None
        return replace(receipt, metrics={**receipt.metrics, "base_bytes": float(base_bytes)})

    async def _send_full(self, engine: BaseEngine, server: Any, version: int) -> WeightReceipt | None:
        exports = getattr(engine, "exports", None)  # an engine of a user's own gathers in its own way
        if self._replica_size == 1 or exports is None:
            params, _ = engine.get_per_tensor_param()
            return await self._sender.send(params, server, version)
        params, _ = engine.get_per_tensor_param(replica_size=self._replica_size, wire_type=self._types.of)
        receipt = await self._sender.send(params, server, version)
        return None if receipt is None else replace(receipt, metrics={**receipt.metrics, **exports.metrics()})

    async def send_through_engine(self, engine: BaseEngine, version: int, mode: str) -> WeightReceipt | None:
        """Send full weights through the checkpoint engine; the receipt of rank 0. *Collective.*"""
        if mode != self._engine_name:
            raise ConfigError(
                f"update_weights(mode={mode!r}): this worker was built for naive and for "
                f"rollout.checkpoint_engine.backend={self._engine_name}"
            )
        params, _ = engine.get_per_tensor_param()
        weights: Iterator[tuple[str, Tensor]] = self._types.cast(params)
        tally = Tally(weights) if self._rank == 0 else None
        metrics = await self.checkpoint_engine.send_weights(weights if tally is None else tally, version)
        if tally is None:
            return None
        return replace(tally.receipt(version, "trainer rank 0"), metrics=metrics or {})


def compute_canary(actor: TrainingWorker) -> Canary:
    """The canary's tokens and their log-probs under the actor's present weights. *Collective.*"""
    vocab = getattr(getattr(actor.engine, "hf_config", None), "vocab_size", None)
    if vocab is None:
        raise ContractError("the canary needs the size of the vocabulary, and this engine has no hf_config")
    tokens = canary_tokens(int(vocab))
    row = torch.tensor(tokens)
    data = TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor([row], layout=torch.jagged),
            "responses": torch.nested.as_nested_tensor([row[1:]], layout=torch.jagged),
        },
        batch_size=[1],
    )
    options = {"compute_loss": False, "calculate_entropy": False, "temperature": 1.0}
    options |= {"use_dynamic_bsz": True, "max_token_len_per_gpu": len(tokens)}
    tu.assign_non_tensor_whole(data, options)
    output = actor.infer_batch(data)
    if output is None:
        return Canary(tuple(tokens), ())
    return Canary(tuple(tokens), tuple(output["log_probs"].values().tolist()))
