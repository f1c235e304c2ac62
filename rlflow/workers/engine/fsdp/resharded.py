"""Weights for replicas that several ranks feed together: each rank gathers its share of the model, not all of it.

The alternative is the full gather of `export.iter_full_tensors`, which always works.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from rlflow.checkpoint_engine.resharding.assembly import ReplicaAssembly, plan_assembly
from rlflow.checkpoint_engine.resharding.executor import ReshardCounts, WireType
from rlflow.utils.moe_weights import expert_parts, splits_experts
from rlflow.workers.engine.fsdp.export import iter_full_tensors, stored_weights
from rlflow.workers.engine.fsdp.model import PackedModel

logger = logging.getLogger(__name__)


class TensorExport:
    """The weights of one module for the rollout; keeps the plan of the exchange between syncs.

    Attributes:
        counts: what the last export moved between ranks; None after a full gather.
    """

    def __init__(self) -> None:
        self.counts: ReshardCounts | None = None
        self._assembly: ReplicaAssembly | None = None
        self._refused = False

    def iterate(
        self, module: PackedModel, *, replica_size: int = 1, wire_type: WireType | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) under Hugging Face names. *Collective*: every rank must exhaust it.

        Args:
            replica_size: ranks of a rollout replica. Above 1 its ranks share the gathering, and only the first of
                them gets tensors; each is valid until the next one. Where that cannot be, all get all of them, and a
                line of the log says why.
            wire_type: (name, stored type) -> type to send. Only ranks that share the gathering apply it.
        """
        self.counts = None
        if replica_size > 1 and not self._refused:
            tensors, adapted = stored_weights(module)
            if self._assembly is None and not self._refuses(tensors, adapted, replica_size):
                self._assembly = plan_assembly(tensors, replica_size, wire_type=wire_type)
            if self._assembly is not None:
                return self._shared(self._assembly, tensors, splits_experts(module.hf_model.config.get_text_config()))
        return iter_full_tensors(module)

    def metrics(self) -> dict[str, float]:
        """What the last export cost this rank; nothing after a full gather."""
        if self.counts is None:
            return {}
        return {"timing_s/reshard": self.counts.seconds, "perf/reshard_bytes": float(self.counts.received_bytes)}

    def _refuses(self, tensors: dict[str, Tensor], adapted: bool, replica_size: int) -> bool:
        reason = _refusal(replica_size, adapted, tensors)
        self._refused = reason is not None
        if self._refused and dist.get_rank() == 0:
            logger.info("weights go to the rollout by a full gather: %s", reason)
        return self._refused

    def _shared(
        self, assembly: ReplicaAssembly, tensors: dict[str, Tensor], per_expert: bool
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in assembly.run(tensors):
            yield from (expert_parts(name, tensor) if per_expert else {name: tensor}).items()
        self.counts = assembly.counts


def _refusal(replica_size: int, adapted: bool, tensors: dict[str, Tensor]) -> str | None:
    """Why ranks cannot share the work, the same on all of them; None when they can."""
    world = dist.get_world_size()
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE") or world)
    if world % replica_size or on_node % replica_size:
        return f"{on_node} ranks of a node do not divide into replicas of {replica_size}"
    if adapted:
        return "an adapter is merged into whole weights"
    if any(value.device.type != "cpu" for value in tensors.values()):
        return "ranks share host memory, and the weights are on a device"
    return None
