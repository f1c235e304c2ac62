"""`naive`: trainer rank and server share a node, so there is nothing but the last hop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

from torch import Tensor

from rlflow.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from rlflow.utils.errors import ContractError


@CheckpointEngineRegistry.register("naive")
class ColocatedCheckpointEngine(CheckpointEngine):
    """Stands for `ActorRolloutRefWorker.update_weights(mode="naive")`; it has no other end and no group."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size, self.is_master = bucket_size, is_master

    def prepare(self) -> NoReturn:
        """Not for this engine."""
        self._refuse("prepare")

    @classmethod
    def build_topology(cls, actor_world_size: int, rollout_world_size: int, metadata: list[Any]) -> NoReturn:
        """Not for this engine."""
        cls._refuse("build_topology")

    def init_process_group(self, **kwargs: Any) -> NoReturn:
        """Not for this engine."""
        self._refuse("init_process_group")

    def finalize(self) -> None:
        """Nothing is kept."""

    async def send_weights(self, weights: Iterator[tuple[str, Tensor]], global_steps: int | None = None) -> NoReturn:
        """Not for this engine."""
        self._refuse("send_weights")

    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """Not for this engine."""
        self._refuse("receive_weights")

    @staticmethod
    def _refuse(method: str) -> NoReturn:
        raise ContractError(
            f"checkpoint_engine.backend=naive has no {method}: a trainer rank hands weights to the server on its node "
            'itself (update_weights(mode="naive")). Replicas on devices of their own need broadcast or disk.'
        )
